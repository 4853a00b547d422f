"""The Triton kernels against the fp64 references. Collected by test_triton.py: on CPU through the interpreter, on CUDA
compiled.

On CUDA the shapes grow to real ones, unless TERRELLA_SMALL_SHAPES is set (for memory checkers).
"""

import math
import os

import pytest
import torch

from terrella.kernels import (
    PolicySettings,
    PolicyTerms,
    adam_update,
    bilevel_gae,
    fsq_dequantize,
    fsq_quantize,
    gae,
    group_advantage,
    linear_logprob,
    linear_policy_loss,
    qkv_rope,
    rmsnorm,
    rope,
    rope_table,
    spread_rows,
    sum_rows,
    swiglu,
    swiglu_backward,
    token_logprob,
    weighted_swiglu,
    weighted_swiglu_backward,
)
from terrella.kernels.adam import reference_adam_update
from terrella.kernels.advantage import METHODS, reference_gae, reference_packed_gae
from terrella.kernels.batch_invariant import batch_invariant
from terrella.kernels.dispatch import interpreting
from terrella.kernels.fsq import reference_fsq_dequantize, reference_fsq_quantize
from terrella.kernels.logprob import reference_token_logprob
from terrella.kernels.policy import Documents
from terrella.kernels.policy_loss import reference_policy_loss
from terrella.kernels.qkv import reference_qkv_rope
from terrella.kernels.rmsnorm import reference_rmsnorm, reference_rmsnorm_backward
from terrella.kernels.rope import reference_rope
from terrella.kernels.rows import reference_sum_rows
from terrella.kernels.swiglu import (
    reference_swiglu,
    reference_swiglu_backward,
    reference_weighted_swiglu,
    reference_weighted_swiglu_backward,
)
from terrella.kernels.triton.rmsnorm import triton_rmsnorm_backward

CUDA = torch.cuda.is_available() and not interpreting()
DEVICE = "cuda" if CUDA else "cpu"
LARGE = CUDA and not os.environ.get("TERRELLA_SMALL_SHAPES")
VOCABS = [1, 77, 2048, 9011] + ([2, 4375, 8192, 13312, 151936, 262144] if LARGE else [])
ROWS = 300 if LARGE else 24
TOKEN_SETTINGS = {
    "grpo": PolicySettings(temperature=0.8, clip_high=0.28, kl_clamp=10.0),
    "dual": PolicySettings(dual_clip=1.5, kl="k2"),
    "k1": PolicySettings(kl="k1"),
}
SEQUENCE_SETTINGS = {
    "gspo": PolicySettings(ratio="sequence", kl="k2"),
    "webrl_paper": PolicySettings(objective="webrl_paper", beta=0.5),
    "webrl_released": PolicySettings(objective="webrl_released"),
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def relative(got, want):
    want = want.double().cpu()
    return ((got.double().cpu() - want).abs() / want.abs().clamp_min(1e-7)).max().item()


def norm_error(got, want, inputs=None):
    """Error relative to the result, or to the `inputs` where they cancel to nothing."""
    want = want.double().cpu()
    size = want.norm() if inputs is None else torch.maximum(want.norm(), inputs.double().cpu().norm())
    return ((got.double().cpu() - want).norm() / size.clamp_min(1e-30)).item()


def logits_case(vocab, rows=4, dtype=torch.bfloat16, spread=5.0):
    x = (torch.randn(rows, vocab) * spread).to(dtype)
    targets = torch.randint(vocab, (rows,))
    targets[0], targets[-1] = 0, vocab - 1
    x[1, targets[1]] = x[1].float().max() + 12.0  # a confident token
    return x.to(DEVICE), targets.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"temperature": 1.7}], ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_token_logprob(vocab, options, dtype):
    if dtype == torch.float32 and vocab not in (77, 9011, 151936):
        pytest.skip("fp32 logits at a few sizes")
    x, targets = logits_case(vocab, dtype=dtype)
    want = reference_token_logprob(x.double(), targets, entropy=True, **options)
    got = token_logprob(x, targets, entropy=True, **options)
    assert relative(got[0], want[0]) <= 1e-6 and relative(got[1], want[1]) <= 1e-6
    alone, nothing = token_logprob(x, targets, **options)
    assert nothing is None and relative(alone, want[0]) <= 1e-6


@pytest.mark.parametrize("columns", [5, 8, 131, 2056] + ([32001, 50257] if LARGE else []))
@pytest.mark.parametrize("part", ["whole", "later rows", "inner columns", "padded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_off_the_grid(columns, part, dtype):
    """Rows that begin anywhere: each is read alone, and its gradient written in place leaves the memory around it as
    it was.
    """
    base = (torch.randn(7, columns + 6) * 3).to(dtype).to(DEVICE)
    vocab = columns - 3 if part == "padded" else columns
    x = {
        "whole": base[:, :columns].contiguous(),
        "later rows": base[2:, :columns],
        "inner columns": base[:, 3 : 3 + columns],
    }.get(part)
    x = base[:, :columns] if x is None else x
    before, inside = base.clone(), torch.zeros_like(base, dtype=torch.bool)
    inside[2 if part == "later rows" else 0 :, 3 if part == "inner columns" else 0 :][:, :columns] = True
    targets = torch.randint(vocab, (len(x),), device=DEVICE)
    targets[0], targets[-1] = 0, vocab - 1
    weights = torch.randn(2, len(x), device=DEVICE)
    weights[:, 1] = 0.0
    exact = x.double().requires_grad_()
    want = reference_token_logprob(exact, targets, entropy=True, vocab_size=vocab)
    (want[0] * weights[0] + want[1] * weights[1]).sum().backward()
    leaf = x.detach().requires_grad_()
    got = token_logprob(leaf, targets, entropy=True, vocab_size=vocab, inplace_backward=True)
    assert relative(got[0], want[0]) <= 1e-6 and relative(got[1], want[1]) <= 1e-6
    (gradient,) = torch.autograd.grad(got, leaf, (weights[0], weights[1]))
    rounding = 2**-8 if CUDA else 2**-7  # of bf16 to the nearest; the interpreter cuts digits off
    assert norm_error(gradient, exact.grad) <= (rounding if dtype == torch.bfloat16 else 2e-6)
    assert (gradient[:, vocab:] == 0).all() and (gradient[1] == 0).all()
    assert torch.equal(base[~inside], before[~inside])


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"temperature": 1.7}], ids=str)
@pytest.mark.parametrize("vocab", [1, 77, 9011] + ([151936] if LARGE else []))
def test_token_logprob_gradient(vocab, options, inplace):
    base, targets = logits_case(vocab, dtype=torch.float32, spread=2.0)
    weights = torch.randn(2, len(targets), device=DEVICE)
    weights[:, 2] = 0.0
    exact = base.double().requires_grad_()
    logp, entropy = reference_token_logprob(exact, targets, entropy=True, **options)
    (logp * weights[0] + entropy * weights[1]).sum().backward()
    leaf = base.clone().requires_grad_()
    x = leaf * 1.0  # the gradient may overwrite this one
    logp, entropy = token_logprob(x, targets, entropy=True, inplace_backward=inplace, **options)
    (logp * weights[0] + entropy * weights[1]).sum().backward()
    assert norm_error(leaf.grad, exact.grad) <= 2e-6
    assert (leaf.grad[2] == 0).all()


def test_confident_tokens_and_confident_mistakes():
    vocab = 5003
    x = torch.randn(24, vocab, device=DEVICE)
    targets = torch.randint(1, vocab, (24,), device=DEVICE)
    margins = torch.arange(24, device=DEVICE) % 12 + 8.0
    rows = torch.arange(24, device=DEVICE)
    x[rows[:12], targets[:12]] = margins[:12] + 4.0
    x[rows[12:], 0] = margins[12:] + 4.0  # another token holds the mass: entropy must still keep its digits
    want = reference_token_logprob(x.double(), targets, entropy=True)
    got = token_logprob(x, targets, entropy=True)
    kept = want[0].abs() >= 1e-7
    assert relative(got[0][kept], want[0][kept]) <= 1e-6
    kept = want[1].abs() >= 1e-7
    assert relative(got[1][kept], want[1][kept]) <= 1e-6


def test_masked_nan_and_infinite_rows():
    inf = math.inf
    x = torch.randn(8, 3000, device=DEVICE)
    x[0, 17] = math.nan
    x[1, 5] = -inf
    x[2] = -inf
    x[3] = -inf
    x[3, 9] = 3.0
    x[4, 7] = inf
    x[5] = math.nan
    x[6] = 3e4
    x[6, 1] = -3e4
    targets = torch.tensor([0, 5, 1, 9, 0, 0, 1, 2999], device=DEVICE)
    mask = torch.tensor([1, 1, 1, 1, 1, 0, 1, 1], device=DEVICE).bool()
    leaf = x.clone().requires_grad_()
    logp, entropy = token_logprob(leaf, targets, entropy=True, mask_N=mask)
    assert logp[0].isnan() and entropy[0].isnan() and logp[2].isnan() and entropy[2].isnan() and logp[4].isnan()
    assert logp[1] == -inf and entropy[1] > 0
    assert logp[3] == 0 and entropy[3] == 0
    assert logp[5] == 0 and entropy[5] == 0
    assert abs(logp[6].item() + 6e4 + math.log(2999)) < 1 and entropy[6].isfinite()
    (logp + entropy).sum().backward()
    assert (leaf.grad[5] == 0).all() and leaf.grad[0].isnan().all() and leaf.grad[[1, 3, 6, 7]].isfinite().all()


def test_all_rows_masked_and_no_rows():
    x = torch.randn(4, 100, device=DEVICE).requires_grad_()
    zero = torch.zeros(4, dtype=torch.long, device=DEVICE)
    logp, entropy = token_logprob(x, zero, mask_N=torch.zeros(4, dtype=torch.bool, device=DEVICE), entropy=True)
    logp.sum().backward()
    assert (logp == 0).all() and (entropy == 0).all() and (x.grad == 0).all()
    assert token_logprob(x[:0], zero[:0])[0].shape == (0,)


def test_padded_columns_and_strided_rows():
    x = torch.randn(5, 2600, device=DEVICE)
    targets = torch.randint(2500, (5,), device=DEVICE)
    leaf = x.clone().requires_grad_()
    logp, entropy = token_logprob(leaf, targets, vocab_size=2500, entropy=True)
    want = reference_token_logprob(x[:, :2500].double(), targets, entropy=True)
    assert relative(logp, want[0]) <= 1e-6 and relative(entropy, want[1]) <= 1e-6
    logp.sum().backward()
    assert (leaf.grad[:, 2500:] == 0).all()
    assert torch.equal(token_logprob(x[:, :2500], targets)[0], token_logprob(x[:, :2500].contiguous(), targets)[0])


@pytest.mark.parametrize(("vocab", "invariant"), [(9024, False), (9011, True)], ids=["even", "odd"])
def test_same_row_same_bits_and_run_to_run(vocab, invariant):
    """An odd vocabulary needs the mode for it: elsewhere its rows are added up from the grid point before them."""
    x, targets = logits_case(vocab, rows=9)
    with batch_invariant(invariant):
        whole = token_logprob(x, targets, entropy=True)
        part = token_logprob(x[3:5], targets[3:5], entropy=True)
        again = token_logprob(x, targets, entropy=True)
    for a, b, c in zip(whole, part, again, strict=True):
        assert torch.equal(a[3:5], b) and torch.equal(a, c)


def head_case(rows, hidden, vocab, dtype=torch.float32):
    h = (torch.randn(rows, hidden) / hidden**0.5 * 3).to(dtype).to(DEVICE).requires_grad_()
    w = torch.randn(vocab, hidden).to(dtype).to(DEVICE).requires_grad_()
    return h, w, torch.randint(vocab - 3, (rows,), device=DEVICE)


def small_chunks(monkeypatch):
    from terrella.kernels.triton import linear as linear_triton

    monkeypatch.setattr(linear_triton, "GRAD_BYTES", 1)
    monkeypatch.setattr(linear_triton, "SCORE_BYTES", 1)
    monkeypatch.setattr(linear_triton, "ROW_TILE", 8)
    monkeypatch.setattr(linear_triton, "COLUMN_TILE", 256)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}], ids=str)
def test_linear_logprob(options, monkeypatch):
    small_chunks(monkeypatch)
    h, w, targets = head_case(ROWS, 24, 401)
    weights = torch.randn(2, ROWS, device=DEVICE)
    got = linear_logprob(h, w, targets, entropy=True, vocab_size=399, **options)
    (got[0] * weights[0] + got[1] * weights[1]).sum().backward()
    h2, w2 = h.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    want = reference_token_logprob(h2 @ w2.T, targets, entropy=True, vocab_size=399, **options)
    (want[0] * weights[0] + want[1] * weights[1]).sum().backward()
    torch.testing.assert_close(got[0].double(), want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[1].double(), want[1], atol=1e-5, rtol=1e-5)
    assert norm_error(h.grad, h2.grad) <= 3e-6 and norm_error(w.grad, w2.grad) <= 3e-6
    assert (w.grad[399:] == 0).all()


@pytest.mark.parametrize("small", [False, True], ids=["one range", "ranges of columns"])
def test_linear_logprob_second_backward_and_scoring(small, monkeypatch):
    if small:
        small_chunks(monkeypatch)
    h, w, targets = head_case(ROWS, 24, 3001 if CUDA else 401)
    logp, _ = linear_logprob(h, w, targets)
    first = torch.autograd.grad(logp.sum(), (h, w), retain_graph=True)  # uses up the logits that the forward kept
    second = torch.autograd.grad(logp.sum(), (h, w))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        scored, _ = linear_logprob(h, w, targets)
    torch.testing.assert_close(scored, logp.detach(), atol=1e-6, rtol=1e-6)


def test_linear_logprob_batch_invariance(monkeypatch):
    from terrella.kernels.triton import linear as linear_triton

    # few rows fit whole, many do not: the columns would be cut for these and not for those
    monkeypatch.setattr(linear_triton, "SCORE_BYTES", 60_000)
    monkeypatch.setattr(linear_triton, "COLUMN_TILE", 256)
    rows, dtype = 1500 if LARGE else 30, torch.bfloat16 if CUDA else torch.float32
    h, w = torch.randn(rows, 64, device=DEVICE, dtype=dtype), torch.randn(1000, 64, device=DEVICE, dtype=dtype) * 0.3
    targets = torch.randint(1000, (rows,), device=DEVICE)
    with torch.no_grad(), batch_invariant():
        whole = linear_logprob(h, w, targets, entropy=True)
        part = linear_logprob(h[7:20], w, targets[7:20], entropy=True)
    assert torch.equal(whole[0][7:20], part[0]) and torch.equal(whole[1][7:20], part[1])


def policy_terms_case(h, w, targets, dead=True):
    rows = len(targets)
    with torch.no_grad():
        logp = reference_token_logprob(h.double() @ w.double().T, targets)[0].float()
    live = torch.rand(rows, device=DEVICE) < (0.8 if dead else 2.0)

    def weight():
        return torch.rand(rows, device=DEVICE) * (live & (torch.rand(rows, device=DEVICE) < 0.7)) / rows

    advantage = torch.randn(rows, device=DEVICE)
    advantage[: rows // 4] = 0.0
    return PolicyTerms(
        ce_weight=weight() * (torch.rand(rows, device=DEVICE) < 0.5),
        pg_weight=weight(),
        kl_weight=weight(),
        entropy_weight=weight() * 0.1,
        advantage=advantage,
        old_logprob=logp + 0.3 * torch.randn(rows, device=DEVICE),
        ref_logprob=logp + 0.3 * torch.randn(rows, device=DEVICE),
    )


def only(terms, *names):
    return PolicyTerms(**{name: getattr(terms, name) for name in names})


SUBSETS = {
    "all": None,
    "sft": ("ce_weight",),
    "reinforce": ("pg_weight", "advantage"),
    "grpo": ("pg_weight", "advantage", "old_logprob"),
    "kl": ("kl_weight", "ref_logprob", "pg_weight", "advantage", "old_logprob"),
}


def compare_policy(h, w, targets, terms, settings, doc, vocab_size, grad_bound=3e-6):
    got = linear_policy_loss(h, w, targets, terms, settings, doc_N=doc, vocab_size=vocab_size)
    got.loss.backward()
    documents = None if doc is None else Documents(doc)

    def reference(dtype):
        like = [x.detach().to(dtype).requires_grad_() for x in (h, w)]
        said = reference_policy_loss(*like, targets, terms, settings, documents=documents, vocab_size=vocab_size)
        said.loss.backward()
        return said, [x.grad for x in like]

    want, exact = reference(torch.float64)
    assert abs(got.loss.item() - want.loss.item()) <= 2e-5 * (1 + abs(want.loss.item()))
    torch.testing.assert_close(got.logprob_N.double(), want.logprob_N, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(got.entropy_N.double(), want.entropy_N, atol=2e-5, rtol=1e-5)
    errors = [norm_error(x.grad, g) for x, g in zip((h, w), exact, strict=True)]
    if max(errors) > grad_bound:  # a sum over a whole document may cancel: fp32 itself is then as far from fp64
        assert h.dtype == torch.float32
        single = reference(torch.float32)[1]
        assert max(errors) <= 1.5 * max(norm_error(g, e) for g, e in zip(single, exact, strict=True))
    assert got.sums.keys() == want.sums.keys()
    for name, value in want.sums.items():
        assert abs(got.sums[name].item() - value.item()) <= 1e-4 * (1 + abs(value.item())), name


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("name", TOKEN_SETTINGS)
def test_policy_loss_token_objectives(name, subset, monkeypatch):
    if subset != "all" and name != "grpo":
        pytest.skip("subsets of the terms with one setting")
    small_chunks(monkeypatch)
    h, w, targets = head_case(ROWS, 16, 203)
    terms = policy_terms_case(h, w, targets)
    terms = terms if SUBSETS[subset] is None else only(terms, *SUBSETS[subset])
    compare_policy(h, w, targets, terms, TOKEN_SETTINGS[name], None, 201)


@pytest.mark.parametrize("documents", [8, 1], ids=["whole documents", "document longer than a chunk"])
@pytest.mark.parametrize("name", SEQUENCE_SETTINGS)
def test_policy_loss_sequence_objectives(name, documents, monkeypatch):
    small_chunks(monkeypatch)
    h, w, targets = head_case(ROWS, 16, 203)
    doc = torch.arange(ROWS, device=DEVICE) * documents // ROWS
    compare_policy(h, w, targets, policy_terms_case(h, w, targets), SEQUENCE_SETTINGS[name], doc, 201)


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_clipped_rows_leave_the_backward(name, monkeypatch):
    from terrella.kernels.triton import linear as linear_triton

    small_chunks(monkeypatch)
    monkeypatch.setattr(linear_triton, "GRAD_BYTES", 203 * 4 * ROWS)  # one chunk of several tiles of rows
    h, w, targets = head_case(ROWS, 16, 203)
    doc = torch.arange(ROWS, device=DEVICE) * 8 // ROWS
    with torch.no_grad():
        logp = reference_token_logprob(h.double() @ w.double().T, targets, vocab_size=201)[0].float()
    far = (doc % 2 == 1).float()  # whole documents past the clip, so that the sequence's ratio is too
    terms = PolicyTerms(
        pg_weight=torch.rand(ROWS, device=DEVICE) / ROWS,
        advantage=torch.rand(ROWS, device=DEVICE) + 0.1,
        old_logprob=logp - far + 0.01 * torch.randn(ROWS, device=DEVICE),
    )
    multiplied, plain = [], linear_triton.add_matmul

    def counting(total, left, right, fresh):
        multiplied.append(len(right))
        plain(total, left, right, fresh)

    monkeypatch.setattr(linear_triton, "add_matmul", counting)
    settings = PolicySettings(ratio="sequence") if name == "gspo" else PolicySettings()
    compare_policy(h, w, targets, terms, settings, doc, 201)
    assert sum(multiplied) < 0.6 * ROWS


def test_policy_loss_without_gradient_and_without_rows():
    h, w, targets = head_case(16, 16, 203)
    terms = policy_terms_case(h, w, targets)
    want = reference_policy_loss(h, w, targets, terms, PolicySettings())
    with torch.no_grad():
        got = linear_policy_loss(h, w, targets, terms, PolicySettings())
    torch.testing.assert_close(got.loss, want.loss.detach(), atol=1e-5, rtol=1e-5)
    nothing = PolicyTerms(ce_weight=torch.zeros(16, device=DEVICE))
    out = linear_policy_loss(h, w, targets, nothing, PolicySettings())
    out.loss.backward()
    assert out.loss == 0 and (h.grad == 0).all() and (w.grad == 0).all()


def test_policy_loss_adds_into_a_gradient_buffer():
    h, w, targets = head_case(20, 16, 203)
    terms = policy_terms_case(h, w, targets)
    linear_policy_loss(h, w, targets, terms, PolicySettings()).loss.backward()
    want_h, want_w = h.grad.clone(), w.grad.clone()
    h.grad = w.grad = None
    buffer = torch.ones_like(w, dtype=torch.float32)
    linear_policy_loss(h, w, targets, terms, PolicySettings(), weight_grad_VH=buffer).loss.backward()
    torch.testing.assert_close(buffer - 1.0, want_w, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(h.grad, want_h)
    assert w.grad is None
    h.grad = None
    (2 * linear_policy_loss(h, w, targets, terms, PolicySettings(), weight_grad_VH=buffer).loss).backward()
    # the buffer already holds a gradient for an upstream gradient of 1
    assert h.grad[terms.active(targets)].isnan().any()


def test_policy_loss_reports_nan():
    h, w, targets = head_case(16, 16, 203)
    terms = policy_terms_case(h, w, targets, dead=False)
    h = h.detach().clone()
    h[int((terms.ce_weight != 0).nonzero()[0])] = math.nan
    assert linear_policy_loss(h, w, targets, terms, PolicySettings()).loss.isnan()
    bad = targets.clone()
    if CUDA:  # on CPU a ValueError says it first
        bad[int((terms.ce_weight != 0).nonzero()[0])] = 10_000
        assert linear_policy_loss(h.nan_to_num(), w, bad, terms, PolicySettings()).loss.isnan()


@pytest.mark.parametrize("tokens", [1, 17, 300, 2500] if LARGE else [1, 40])
@pytest.mark.parametrize("gamma,lam", [(1.0, 1.0), (0.97, 0.9), (0.9, 0.2)])
def test_gae(tokens, gamma, lam, monkeypatch):
    if not LARGE:  # the interpreter scans element by element; small blocks still meet the carry between blocks
        from terrella.kernels.triton import advantage as advantage_triton

        monkeypatch.setattr(advantage_triton, "gae_config", lambda tokens: (16, 1))
    rows = 5 if LARGE else 2
    mask = torch.rand(rows, tokens, device=DEVICE) < 0.6
    rewards, values = torch.randn(rows, tokens, device=DEVICE) * mask, torch.randn(rows, tokens, device=DEVICE)
    got = gae(rewards, values, mask, gamma=gamma, lam=lam)
    want = reference_gae(rewards.double(), values.double(), mask, gamma=gamma, lam=lam)
    for a, b in zip(got, want, strict=True):
        assert norm_error(a, b) <= 2e-6
    ends = mask & (torch.rand(rows, tokens, device=DEVICE) < 0.2)
    rewards = rewards * ends
    got = bilevel_gae(rewards, values, mask, ends, gamma=gamma, lam=lam)
    want = bilevel_gae(rewards.double(), values.double(), mask, ends, gamma=gamma, lam=lam)
    for a, b in zip(got, want, strict=True):
        assert norm_error(a, b, values) <= 2e-6  # at a turn's end reward and value cancel exactly


@pytest.mark.parametrize(
    "lengths", [[1], [5, 1, 40, 17], [0, 3, 0]] + ([[3000, 1, 513, 512, 2048, 77]] if LARGE else []), ids=str
)
@pytest.mark.parametrize("lam", [0.9, 0.2])
def test_gae_of_rows_end_to_end(lengths, lam, monkeypatch):
    if not LARGE:
        from terrella.kernels.triton import advantage as advantage_triton

        monkeypatch.setattr(advantage_triton, "gae_config", lambda tokens: (16, 1))
    tokens = sum(lengths)
    mask = torch.rand(tokens, device=DEVICE) < 0.6
    ends = mask & (torch.rand(tokens, device=DEVICE) < 0.3)
    rewards, values = torch.randn(tokens, device=DEVICE) * ends, torch.randn(tokens, device=DEVICE)
    options = {"gamma": 0.97, "lam": lam}
    got = gae(rewards, values, mask, lengths=lengths, **options)
    want = reference_packed_gae(rewards.double(), values.double(), mask, lengths, **options)
    for a, b in zip(got, want, strict=True):
        assert norm_error(a, b, values) <= 2e-6
    got = bilevel_gae(rewards, values, mask, ends, lengths=lengths, **options)
    want = bilevel_gae(rewards.double(), values.double(), mask, ends, lengths=lengths, **options)
    for a, b in zip(got, want, strict=True):
        assert norm_error(a, b, values) <= 2e-6


@pytest.mark.parametrize(
    "groups,samples", [(1, 1), (3, 8), (7, 40)] + ([(64, 16), (2, 5000), (1000, 8)] if LARGE else [])
)
@pytest.mark.parametrize("method", METHODS)
def test_group_advantage(method, groups, samples):
    """Groups in any order and of any size, one of a single sample and one of none; rewards that differ by little
    beside their mean.
    """
    ids = torch.randint(groups, (groups * samples,))
    ids[0] = groups
    rewards = (1000.0 + 0.1 * torch.randn(len(ids)) + ids).to(DEVICE)
    valid = torch.rand(len(ids)) < 0.8
    valid[ids == 0] = False
    rewards[~valid] = math.nan
    got = group_advantage(rewards, ids, method=method, valid_S=valid)
    want = group_advantage(rewards.double(), ids, method=method, valid_S=valid)
    assert got.dtype == torch.float32 and got.device == rewards.device
    assert relative(got, want) <= 2e-7 and (got[~valid] == 0).all()
    rewards[valid.nonzero()[0]] = math.inf
    assert not valid.any() or not group_advantage(rewards, ids, method="mean", valid_S=valid).isfinite().all()


def test_uniform_std_is_of_all_ranks_groups():
    rewards, ids = torch.randn(12, device=DEVICE), torch.arange(12) // 3
    want = group_advantage(rewards.double(), ids, method="uniform_std")
    parts = []
    for part in (slice(0, 6), slice(6, 12)):  # each rank's share, to be gathered
        group_advantage(
            rewards[part], ids[part], method="uniform_std", gather=lambda value: parts.append(value) or [value]
        )
    got = [
        group_advantage(rewards[s], ids[s], method="uniform_std", gather=lambda _: parts)
        for s in (slice(0, 6), slice(6, 12))
    ]
    assert relative(torch.cat(got), want) <= 1e-6


@pytest.mark.parametrize(
    "lengths", [[], [3], [5, 0, 40, 1, 17]] + ([[4096] * 300, [1, 9000, 2048]] if LARGE else []), ids=len
)
def test_spread_rows(lengths):
    values = torch.randn(4, device=DEVICE)
    samples = [i % 4 for i in range(len(lengths))]
    want = [values[s].item() for s, n in zip(samples, lengths, strict=True) for _ in range(n)]
    assert spread_rows(values, samples, lengths).tolist() == want


@pytest.mark.parametrize("hidden", [7, 256, 1536])
@pytest.mark.parametrize("residual", [False, True])
def test_rmsnorm(hidden, residual):
    x, r, w = (
        torch.randn(9, hidden, device=DEVICE),
        torch.randn(9, hidden, device=DEVICE),
        torch.rand(hidden, device=DEVICE) + 0.5,
    )
    g1, g2 = torch.randn(9, hidden, device=DEVICE), torch.randn(9, hidden, device=DEVICE)
    grads = []
    for wide, op in ((torch.float32, rmsnorm), (torch.float64, reference_rmsnorm)):
        leaves = [v.detach().clone().to(wide).requires_grad_() for v in (x, w, r)]
        y, s = op(leaves[0], leaves[1], leaves[2] if residual else None, eps=1e-6)
        (y * g1 + s * g2).sum().backward()
        grads.append([y, s, leaves[0].grad, leaves[1].grad] + ([leaves[2].grad] if residual else []))
    for a, b in zip(*grads, strict=True):
        assert norm_error(a, b) <= 1e-6


@pytest.mark.parametrize("dim,rotated", [(16, 16), (24, 12)])
def test_rope(dim, rotated):
    table = rope_table(64, rotated, theta=1e4).to(DEVICE)
    positions = torch.tensor([0, 1, 2, 0, 1, 63, 5], device=DEVICE)
    base, grad = torch.randn(7, 5, dim, device=DEVICE), torch.randn(7, 5, dim, device=DEVICE)
    x, x2 = base.clone().requires_grad_(), base.double().requires_grad_()
    y, y2 = rope(x, table, positions), reference_rope(x2, table, positions)
    (y * grad).sum().backward()
    (y2 * grad).sum().backward()
    assert norm_error(y, y2) <= 1e-6 and norm_error(x.grad, x2.grad) <= 1e-6
    assert torch.equal(y[0], base[0])
    assert rope(base, table, positions + 60)[6].isnan().any()  # past the table


@pytest.mark.parametrize("width", [3, 128, 2500])
def test_swiglu(width):
    base, grad = torch.randn(4, 2, 2 * width, device=DEVICE) * 3, torch.randn(4, 2, width, device=DEVICE)
    x, x2 = base.clone().requires_grad_(), base.double().requires_grad_()
    y, y2 = swiglu(x), reference_swiglu(x2)
    (y * grad).sum().backward()
    (y2 * grad).sum().backward()
    assert norm_error(y, y2) <= 1e-6 and norm_error(x.grad, x2.grad) <= 1e-6
    for dx, again in (swiglu_backward(base, grad), reference_swiglu_backward(base, grad)):
        assert norm_error(dx, x2.grad) <= 1e-6 and norm_error(again, y2) <= 1e-6


@pytest.mark.skipif(not LARGE, reason="the interpreter's grid has no limits")
def test_swiglu_of_more_rows_than_a_grid_is_high():
    x = torch.randn(70_000, 32, device=DEVICE)
    assert norm_error(swiglu(x), reference_swiglu(x.double())) <= 1e-6


@pytest.mark.parametrize("rows,width", [(5, 3), (8, 128), (4, 2500), (0, 16), *([(70_000, 768)] if LARGE else [])])
def test_weighted_swiglu(rows, width):
    x, dy = torch.randn(rows, 2 * width, device=DEVICE) * 3, torch.randn(rows, width, device=DEVICE)
    weight = torch.rand(rows, device=DEVICE)
    x2, weight2 = x.double().requires_grad_(), weight.double().requires_grad_()
    y2 = reference_swiglu(x2) * weight2[:, None]
    want_dx, want_dweight = torch.autograd.grad(y2, (x2, weight2), dy.double())
    for y in (weighted_swiglu(x, weight), reference_weighted_swiglu(x, weight)):
        assert norm_error(y, y2) <= 1e-6
    for dx, dweight, again in (
        weighted_swiglu_backward(x, weight, dy),
        reference_weighted_swiglu_backward(x, weight, dy),
    ):
        assert (
            norm_error(dx, want_dx) <= 1e-6
            and norm_error(dweight, want_dweight) <= 1e-6
            and norm_error(again, y2) <= 1e-6
        )


@pytest.mark.parametrize(
    "sums,per_sum,width", [(5, 1, 3), (9, 8, 128), (4, 3, 2500), (0, 2, 16), *([(70_000, 8, 256)] if LARGE else [])]
)
def test_sum_rows(sums, per_sum, width):
    x = torch.randn(sums * per_sum + 2, width, device=DEVICE)
    rows = torch.randint(0, len(x), (sums, per_sum), device=DEVICE)
    want = torch.stack([x.double()[rows[:, k]] for k in range(per_sum)]).sum(0)
    for got in (sum_rows(x, rows), reference_sum_rows(x, rows)):
        assert got.shape == want.shape and norm_error(got, want) <= 1e-6
    narrow = x.bfloat16()  # added up in fp32, rounded once
    want = torch.stack([narrow.double()[rows[:, k]] for k in range(per_sum)]).sum(0)
    for got in (sum_rows(narrow, rows), reference_sum_rows(narrow, rows)):
        assert norm_error(got, want) <= 2.0**-8


@pytest.mark.parametrize("levels", [[7, 5, 5, 5, 5], [8, 6, 5], [8, 8, 8, 6, 5]], ids=str)
def test_fsq(levels):
    z = (torch.randn(50, 7, len(levels), device=DEVICE) * 1.5).requires_grad_()
    code, index = fsq_quantize(z, levels)
    code.sum().backward()
    z2 = z.detach().clone().requires_grad_()
    want, want_index = reference_fsq_quantize(z2, levels)
    want.sum().backward()
    assert torch.equal(index, want_index)
    torch.testing.assert_close(code, want, atol=1e-6, rtol=1e-6)
    assert norm_error(z.grad, z2.grad) <= 1e-5
    torch.testing.assert_close(fsq_dequantize(index, levels), code.detach(), atol=1e-6, rtol=1e-6)
    every = torch.arange(math.prod(levels), device=DEVICE)
    codes = fsq_dequantize(every, levels)
    assert torch.equal(codes, reference_fsq_dequantize(every, levels))
    poisoned = z.detach().clone()
    poisoned[0, 0, 0] = math.nan
    assert fsq_quantize(poisoned, levels)[1][0, 0] == -1


@pytest.mark.parametrize(
    ("heads", "groups", "dim", "rotated"), [(12, 2, 16, 16), (4, 4, 8, 4), (6, 1, 24, 16)], ids=str
)
@pytest.mark.parametrize("biased", [True, False])
def test_qkv_rope(heads, groups, dim, rotated, biased):
    tokens, columns = 5, (heads + 2 * groups) * dim
    base, table = torch.randn(tokens, columns, device=DEVICE), rope_table(tokens, rotated).to(DEVICE)
    shift = torch.randn(columns, device=DEVICE) if biased else None
    x, x2 = base.clone().requires_grad_(), base.double().requires_grad_()
    b, b2 = (None, None) if shift is None else (shift.clone().requires_grad_(), shift.double().requires_grad_())
    got, want = qkv_rope(x, b, table, heads, groups), reference_qkv_rope(x2, b2, table.double(), heads, groups)
    grads = [torch.randn(y.shape, device=DEVICE) for y in got]
    sum((y * g).sum() for y, g in zip(got, grads, strict=True)).backward()
    sum((y * g).sum() for y, g in zip(want, grads, strict=True)).backward()
    assert all(norm_error(y, y2) <= 1e-6 for y, y2 in zip(got, want, strict=True))
    assert norm_error(x.grad, x2.grad) <= 1e-6
    assert b is None or norm_error(b.grad, b2.grad) <= 1e-6


@pytest.mark.parametrize("config", [(1, 4, 8, 1), (1, 4, 8, 3), (2, 4, 4, 3), (4, 8, 2, 2)], ids=str)
def test_rmsnorm_backward_by_several_rows(config):
    """Whatever a program takes at once, rows left over at its end and columns beyond the width count for nothing."""
    rows, hidden = (9001, 1536) if LARGE else (37, 80)  # of the large one every program goes round several times
    dy, dsum, x = (torch.randn(rows, hidden, device=DEVICE) for _ in range(3))
    weight = torch.rand(hidden, device=DEVICE)
    rstd = torch.rsqrt(x.square().mean(-1) + 1e-6)
    wide = (t.double() for t in (dy, dsum, x, weight, rstd))
    for got, want in zip(
        triton_rmsnorm_backward(dy, dsum, x, weight, rstd, config), reference_rmsnorm_backward(*wide), strict=True
    ):
        assert norm_error(got, want) <= 1e-6


def test_adam_update():
    """Several tensors at once, larger than a program's part and smaller, of sizes that are and are not multiples of
    16.
    """
    sizes = (3, 5000, 70000, 65536, 0)
    options = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
    starts = [torch.randn(size, device=DEVICE) for size in sizes]
    theirs = [start.double().requires_grad_() for start in starts]
    adam = torch.optim.AdamW(theirs, **options)
    steps = [torch.zeros((), device=DEVICE) for _ in sizes]
    runs = []
    for update in (adam_update, reference_adam_update):
        masters = [start.clone() for start in starts]
        copies = [None if size == 5000 else start.bfloat16() for size, start in zip(sizes, starts, strict=True)]
        runs.append(
            (update, masters, [torch.zeros_like(x) for x in starts], [torch.zeros_like(x) for x in starts], copies)
        )
    for divisor in (1.0, 2.5, float("nan"), 1.0):
        grads = [torch.randn(size, device=DEVICE) for size in sizes]
        if divisor == divisor:
            torch._foreach_add_(steps, 1.0)
            for their, grad in zip(theirs, grads, strict=True):
                their.grad = grad.double() / divisor
            adam.step()
        for update, masters, averages, squares, copies in runs:
            parts = list(zip(masters, grads, averages, squares, copies, steps, strict=True))
            update(parts, torch.tensor(divisor, device=DEVICE), **options)
            for their, master, copy in zip(theirs, masters, copies, strict=True):
                assert not len(master) or norm_error(master, their) <= 1e-6
                if copy is not None:
                    # Triton's interpreter cuts, a GPU rounds
                    torch.testing.assert_close(copy.float(), master, rtol=2**-7, atol=0)


def test_adam_refuses_what_it_would_misread():
    x = torch.zeros(32, device=DEVICE)
    with pytest.raises(ValueError, match="contiguous fp32"):
        adam_update(
            [(x, x[::2], x, x, None, torch.ones((), device=DEVICE))], torch.ones((), device=DEVICE), lr=1.0,
            betas=(0.9, 0.9), eps=1.0,
            weight_decay=0.0,
        )  # fmt: skip
