"""Log-prob and entropy references against fp64 arithmetic done another way."""

import math

import pytest
import torch

from terrella.kernels import linear_logprob, token_logprob
from terrella.kernels.logprob import reference_token_logprob


def oracle(logits, targets, temperature=1.0):
    """fp64, the other tokens summed without the target."""
    x = logits.double() / temperature
    xt = x.gather(1, targets[:, None])
    others = (x - xt).scatter(1, targets[:, None], -math.inf)
    top = others.amax(1, keepdim=True).clamp_min(0)
    logp = -torch.where(
        top[:, 0] == 0,
        torch.log1p(others.exp().sum(1)),
        top[:, 0] + torch.log((others - top).exp().sum(1) + (-top[:, 0]).exp()),
    )
    best = x.argmax(1, keepdim=True)
    gap = x - x.gather(1, best)
    rest = gap.exp().scatter(1, best, 0.0)
    log_norm = torch.log1p(rest.sum(1))
    entropy = log_norm - (rest * torch.where(rest > 0, gap, torch.zeros_like(gap))).sum(1) / (1 + rest.sum(1))
    return logp, entropy


def relative(got, want):
    return ((got.double() - want).abs() / want.abs().clamp_min(1e-7)).max().item()


@pytest.mark.parametrize("vocab", [1, 2, 3, 7, 129, 4608, 32001])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"temperature": 1.7}], ids=str)
def test_matches_fp64(vocab, options):
    torch.manual_seed(vocab)
    logits = (torch.randn(33, vocab) * 6).bfloat16()
    targets = torch.randint(vocab, (33,))
    logp, entropy = token_logprob(logits, targets, entropy=True, **options)
    want_logp, want_entropy = oracle(logits, targets, **options)
    assert logp.dtype == entropy.dtype == torch.float32
    assert relative(logp, want_logp) <= 1e-6
    assert relative(entropy, want_entropy) <= 1e-6


@pytest.mark.parametrize("vocab", [151936, 262144])
def test_large_vocabulary(vocab):
    torch.manual_seed(0)
    logits = (torch.randn(3, vocab) * 3).bfloat16()
    targets = torch.tensor([0, vocab - 1, vocab // 2])
    logp, entropy = token_logprob(logits, targets, entropy=True)
    want_logp, want_entropy = oracle(logits, targets)
    assert relative(logp, want_logp) <= 1e-6 and relative(entropy, want_entropy) <= 1e-6


@pytest.mark.parametrize("margin", [2.0, 8.0, 10.0, 12.0, 15.0, 16.0])
def test_confident_tokens_keep_their_digits(margin):
    torch.manual_seed(1)
    logits = torch.randn(64, 50)
    targets = torch.randint(50, (64,))
    logits[torch.arange(64), targets] = logits.amax(1) + margin
    logits[32:] += 80.0
    logp, entropy = token_logprob(logits, targets, entropy=True)
    want_logp, want_entropy = oracle(logits, targets)
    kept = want_logp.abs() >= 1e-7
    assert relative(logp[kept], want_logp[kept]) <= 1e-6
    assert relative(entropy[kept], want_entropy[kept]) <= 1e-6
    # the usual form is what this one replaces
    naive = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    if margin == 15.0:
        assert relative(naive[kept], want_logp[kept]) > 1e-3


def test_entropy_of_a_confident_wrong_token():
    logits = torch.zeros(2, 40)
    logits[:, 3] = 18.0
    _, entropy = token_logprob(logits, torch.tensor([5, 3]), entropy=True)
    _, want = oracle(logits, torch.tensor([5, 3]))
    assert relative(entropy, want) <= 1e-6


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}], ids=str)
def test_gradcheck(options):
    torch.manual_seed(2)
    logits = (torch.randn(5, 9, dtype=torch.float64) * 3).requires_grad_()
    targets = torch.randint(9, (5,))
    mask = torch.tensor([1, 1, 0, 1, 1]).bool()
    assert torch.autograd.gradcheck(lambda x: token_logprob(x, targets, mask_N=mask, entropy=True, **options), logits)


def test_gradient_is_softmax_minus_onehot():
    torch.manual_seed(3)
    logits = torch.randn(6, 11, requires_grad=True)
    targets = torch.randint(11, (6,))
    token_logprob(logits, targets)[0].sum().backward()
    want = torch.nn.functional.one_hot(targets, 11) - torch.softmax(logits.detach(), -1)
    torch.testing.assert_close(logits.grad, want.to(torch.float32), atol=1e-6, rtol=1e-5)


def test_masked_rows_are_zero_and_unread():
    logits = torch.full((3, 5), math.nan)
    logits[1] = torch.arange(5.0)
    logits.requires_grad_()
    logp, entropy = token_logprob(logits, torch.tensor([99, 2, -100]), mask_N=torch.tensor([0, 1, 0]), entropy=True)
    assert logp[0] == 0 and logp[2] == 0 and entropy[0] == 0 and logp[1] < 0
    logp.sum().backward()
    assert (logits.grad[[0, 2]] == 0).all() and logits.grad[1].abs().sum() > 0


def test_all_rows_masked():
    logits = torch.randn(4, 5, requires_grad=True)
    logp, _ = token_logprob(logits, torch.zeros(4, dtype=torch.long), mask_N=torch.zeros(4, dtype=torch.bool))
    logp.sum().backward()
    assert (logp == 0).all() and (logits.grad == 0).all()


def test_nan_is_reported_and_inf_is_handled():
    inf = math.inf
    logits = torch.tensor(
        [[1.0, math.nan, 2.0], [-inf, 1.0, 2.0], [-inf, -inf, -inf], [-inf, 3.0, -inf], [inf, 0.0, 0.0]]
    )
    logp, entropy = token_logprob(logits, torch.tensor([0, 0, 1, 1, 0]), entropy=True)
    assert logp[0].isnan() and entropy[0].isnan()
    assert logp[1] == -inf and entropy[1] > 0
    assert logp[2].isnan() and entropy[2].isnan()
    assert logp[3] == 0 and entropy[3] == 0
    assert logp[4].isnan()


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[3e4, -3e4, 0.0], [1e30, -1e30, 1e30]])
    logp, entropy = token_logprob(logits, torch.tensor([1, 0]), entropy=True)
    assert logp.isfinite().all() and entropy.isfinite().all()
    assert abs(logp[0].item() + 6e4) < 1 and abs(logp[1].item() + math.log(2)) < 1e-6


def test_target_outside_vocabulary_is_an_error():
    with pytest.raises(ValueError, match="target id 7"):
        token_logprob(torch.zeros(2, 5), torch.tensor([1, 7]))


def test_padded_vocabulary_takes_no_mass():
    torch.manual_seed(4)
    logits = torch.randn(4, 8)
    got = token_logprob(logits, torch.tensor([0, 1, 2, 4]), entropy=True, vocab_size=5)
    want = token_logprob(logits[:, :5], torch.tensor([0, 1, 2, 4]), entropy=True)
    torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="vocab_size"):
        token_logprob(logits, torch.tensor([0, 1, 2, 4]), vocab_size=9)


def test_linear_logprob_gradcheck_and_value():
    torch.manual_seed(5)
    hidden = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(10, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(9, (6,))
    got = linear_logprob(hidden, weight, targets, entropy=True, temperature=0.8, vocab_size=9)
    want = reference_token_logprob((hidden @ weight.T)[:, :9], targets, entropy=True, temperature=0.8)
    torch.testing.assert_close(got, want)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_logprob(h, w, targets, entropy=True, vocab_size=9), (hidden, weight)
    )
