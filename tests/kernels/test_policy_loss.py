"""The policy loss reference: hand-computed tables, gradcheck, WebRL goldens, reported sums."""

import math
from dataclasses import replace

import pytest
import torch

from terrella.kernels import PolicySettings, PolicyTerms, linear_policy_loss
from terrella.kernels.policy import Documents, reference_policy_terms


def column(*values):
    return torch.tensor(values, dtype=torch.float64)


def terms_loss(logprob, terms, settings, entropy=None, doc=None):
    return reference_policy_terms(logprob, entropy, terms, settings, None if doc is None else Documents(doc))


def test_clip_by_hand():
    # ratio 1.5: A=1 clips at 1.28, A=-1 does not; ratio 0.5: A=-1 clips at 0.8, A=1 does not; ratio 5, A=-1 meets the
    # dual clip
    logp = torch.log(column(1.5, 1.5, 0.5, 0.5, 5.0)).requires_grad_()
    terms = PolicyTerms(
        pg_weight=torch.full((5,), 0.2).double(),
        advantage=column(1, -1, -1, 1, -1),
        old_logprob=torch.zeros(5).double(),
    )
    loss, sums = terms_loss(logp, terms, PolicySettings(clip_high=0.28, dual_clip=3.0))
    assert loss.item() == pytest.approx(0.2 * (-1.28 + 1.5 + 0.8 - 0.5 + 3.0))
    loss.backward()
    torch.testing.assert_close(logp.grad, column(0.0, 0.2 * 1.5, 0.0, -0.2 * 0.5, 0.0))
    assert (sums["clipped_high"], sums["clipped_low"], sums["dual_clipped"]) == (1, 1, 1)
    assert sums["ratio"].item() == pytest.approx(9.0) and sums["pg_tokens"] == 5


def test_on_policy_is_reinforce():
    logp = column(-1.0, -2.0).requires_grad_()
    loss, _ = terms_loss(logp, PolicyTerms(pg_weight=column(0.5, 0.5), advantage=column(2.0, -3.0)), PolicySettings())
    loss.backward()
    assert loss.item() == pytest.approx(0.5)
    torch.testing.assert_close(logp.grad, column(-1.0, 1.5))


@pytest.mark.parametrize(
    "kl,value,grad", [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", math.exp(-0.5) + 0.5 - 1, 1 - math.exp(-0.5))]
)
def test_kl_estimators(kl, value, grad):
    logp = column(-1.0).requires_grad_()
    loss, sums = terms_loss(logp, PolicyTerms(kl_weight=column(2.0), ref_logprob=column(-1.5)), PolicySettings(kl=kl))
    loss.backward()
    assert loss.item() == pytest.approx(2 * value) and sums["kl"].item() == pytest.approx(value)
    assert logp.grad.item() == pytest.approx(2 * grad)


def test_kl_clamp_stops_value_and_gradient():
    logp = column(-200.0, -1.0).requires_grad_()
    terms = PolicyTerms(kl_weight=column(1.0, 1.0), ref_logprob=column(-1.0, -1.0))
    loss, _ = terms_loss(logp, terms, PolicySettings(kl_clamp=10.0))
    loss.backward()
    assert loss.item() == pytest.approx(10.0) and (logp.grad == 0).all()


def test_sequence_ratio_by_hand():
    # document 0: mean log ratio 0.1; document 1: 0.5, clipped at 1.2 for A > 0
    logp = column(-1.0, -1.0, -0.5, -0.5).requires_grad_()
    old = column(-1.2, -1.0, -1.0, -1.0)
    terms = PolicyTerms(pg_weight=column(0.25, 0.25, 0.25, 0.25), advantage=column(2.0, 2.0, 1.0, 1.0), old_logprob=old)
    loss, sums = terms_loss(logp, terms, PolicySettings(ratio="sequence"), doc=torch.tensor([0, 0, 1, 1]))
    loss.backward()
    assert loss.item() == pytest.approx(-math.exp(0.1) - 0.6)
    torch.testing.assert_close(logp.grad, column(-0.5 * math.exp(0.1), -0.5 * math.exp(0.1), 0.0, 0.0))
    assert sums["clipped_high"] == 2


WEBRL = [
    ((-10, -10, 20, 0.5), 0.5),
    ((-8, -10, 20, 0.5), 0.405),
    ((-2, -2.5, 20, 0.5), 0.0765625),
    ((-1, -2.5, 20, 0.5), 0.0390625),
    ((-10, -10, 20, -0.5), 0.0),
    ((0, -40, 20, 0.5), 0.0),
]


@pytest.mark.parametrize("case,want", WEBRL)
def test_webrl_released_goldens(case, want):
    total, ref, count, advantage = case

    def spread(v):
        return torch.full((count,), v / count, dtype=torch.float64)

    terms = PolicyTerms(
        pg_weight=spread(1.0), advantage=torch.full((count,), advantage).double(), ref_logprob=spread(ref)
    )
    loss, _ = terms_loss(
        spread(total), terms, PolicySettings(objective="webrl_released"), doc=torch.zeros(count).long()
    )
    assert loss.item() == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("normalize", [True, False])
def test_webrl_paper_equation(normalize):
    logp = column(-1.0, -0.5, -2.0).requires_grad_()
    ref, doc = column(-1.2, -0.4, -1.0), torch.tensor([0, 0, 1])
    terms = PolicyTerms(pg_weight=column(0.25, 0.25, 0.5), advantage=column(0.7, 0.7, -0.3), ref_logprob=ref)
    loss, _ = terms_loss(
        logp, terms, PolicySettings(objective="webrl_paper", beta=0.3, length_normalize=normalize), doc=doc
    )
    first = 0.1 / (2 if normalize else 1)
    assert loss.item() == pytest.approx(0.5 * (0.3 * first - 0.7) ** 2 + 0.5 * (0.3 * -1.0 + 0.3) ** 2)
    assert torch.autograd.gradcheck(
        lambda x: terms_loss(
            x, terms, PolicySettings(objective="webrl_paper", beta=0.3, length_normalize=normalize), doc=doc
        )[0],
        logp,
    )


def make_case(rows=14, hidden=5, vocab=11, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    h = torch.randn(rows, hidden, dtype=dtype).requires_grad_()
    w = torch.randn(vocab, hidden, dtype=dtype).requires_grad_()
    targets = torch.randint(vocab - 1, (rows,))
    logp = torch.log_softmax(h.detach() @ w.detach()[: vocab - 1].T, -1).gather(1, targets[:, None])[:, 0]
    live = torch.rand(rows) < 0.8
    live[3] = False

    def weight():
        return torch.rand(rows, dtype=dtype) * (live & (torch.rand(rows) < 0.7))

    terms = PolicyTerms(
        ce_weight=weight(),
        pg_weight=weight(),
        kl_weight=weight(),
        entropy_weight=weight() * 0.1,
        advantage=torch.randn(rows, dtype=dtype),
        old_logprob=logp + 0.3 * torch.randn(rows, dtype=dtype),
        ref_logprob=logp + 0.3 * torch.randn(rows, dtype=dtype),
    )
    return h, w, targets, terms, torch.arange(rows) * 4 // rows


@pytest.mark.parametrize(
    "settings",
    [
        PolicySettings(temperature=0.8, clip_high=0.28, dual_clip=3.0, kl_clamp=10.0),
        PolicySettings(ratio="sequence", kl="k2"),
        PolicySettings(objective="webrl_paper", beta=0.5, kl="k1"),
    ],
    ids=["token", "gspo", "webrl"],
)
def test_gradcheck(settings):
    h, w, targets, terms, doc = make_case()

    def run(h, w):
        return linear_policy_loss(h, w, targets, terms, settings, doc_N=doc, vocab_size=10).loss

    assert torch.autograd.gradcheck(run, (h, w))


def test_rows_without_weight_are_left_alone():
    h, w, targets, terms, _ = make_case(dtype=torch.float32)
    dead = ~terms.active(targets)
    assert dead.any()
    poisoned = h.detach().clone()
    poisoned[dead] = math.nan
    bad_targets = torch.where(dead, -100, targets)
    clean = linear_policy_loss(h, w, targets, terms, PolicySettings())
    dirty = linear_policy_loss(poisoned, w, bad_targets, terms, PolicySettings())
    torch.testing.assert_close(dirty.loss, clean.loss)
    assert (clean.logprob_N[dead] == 0).all() and (clean.entropy_N[dead] == 0).all()
    assert not clean.logprob_N.requires_grad and not clean.entropy_N.requires_grad
    assert clean.sums["tokens"] == (~dead).sum()


@pytest.mark.parametrize(
    "settings", [PolicySettings(), PolicySettings(objective="webrl_released")], ids=["clip", "webrl"]
)
def test_no_active_rows(settings):
    h, w, targets, terms, doc = make_case(dtype=torch.float32)
    nothing = PolicyTerms(
        pg_weight=torch.zeros(14), advantage=terms.advantage.float(), ref_logprob=terms.ref_logprob.float()
    )
    out = linear_policy_loss(h, w, targets, nothing, settings, doc_N=doc)
    out.loss.backward()
    assert out.loss == 0 and (w.grad == 0).all() and (h.grad == 0).all()


def test_nan_reaches_the_loss():
    h, w, targets, terms, _ = make_case(dtype=torch.float32)
    live = terms.active(targets).nonzero()[0]
    poisoned = h.detach().clone()
    poisoned[live] = math.nan
    assert linear_policy_loss(poisoned, w, targets, terms, PolicySettings()).loss.isnan()


def test_errors_name_the_field():
    h, w, targets, terms, _ = make_case()
    with pytest.raises(ValueError, match="advantage is missing"):
        linear_policy_loss(h, w, targets, replace(terms, advantage=None), PolicySettings())
    with pytest.raises(ValueError, match=r"PolicyTerms\.ce_weight has shape"):
        linear_policy_loss(h, w, targets, replace(terms, ce_weight=torch.zeros(3)), PolicySettings())
    with pytest.raises(ValueError, match="needs doc_N"):
        linear_policy_loss(h, w, targets, terms, PolicySettings(ratio="sequence"))
    with pytest.raises(ValueError, match=r"PolicySettings\.kl"):
        PolicySettings(kl="k4")
