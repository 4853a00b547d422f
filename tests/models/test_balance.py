"""The loss that keeps experts' choices even, against its formula."""

from __future__ import annotations

import pytest
import torch

from terrella.core.batch import PackedBatch
from terrella.core.errors import ConfigError
from terrella.core.layout import balance_weights, pad_batch, trained_lengths
from terrella.models.replay import Balance, Replay
from terrella.tests.parallel.pool import run_ranks


def batch(lengths: list[int], weights: list[float]) -> PackedBatch:
    tokens = torch.arange(sum(lengths))
    weight_T = torch.cat([torch.full((n,), w) for n, w in zip(lengths, weights, strict=True)])
    cuts = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedBatch(tokens, tokens, tokens, cuts, max(lengths), ce_weight_T=weight_T)


@pytest.mark.parametrize("probabilities", [False, True])
def test_gradient_and_value_are_those_of_the_formula(probabilities: bool) -> None:
    lengths, experts, topk, coefficient = [5, 2, 4], 6, 2, 0.3
    draw = torch.Generator().manual_seed(1)
    scores = torch.randn(sum(lengths), experts, generator=draw, dtype=torch.float64)
    scores = (scores.softmax(-1) if probabilities else scores).requires_grad_()
    total = sum(lengths) + 7  # other microbatches have the rest
    lengths_D = trained_lengths(batch(lengths, [1.0, 0.0, 0.5]))
    assert lengths_D.tolist() == [5, 0, 4]
    document_T = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    replay = Replay(probabilities)
    replay.balance = Balance(document_T, balance_weights(lengths_D, total, coefficient), None)
    found, chosen = replay.get_replay_topk(scores, topk, None, None, lambda s, k, **_: s.topk(k))
    (ours,) = torch.autograd.grad((found * 0.0).sum(), scores)

    wanted = torch.zeros((), dtype=torch.float64)
    probs = scores if probabilities else scores.softmax(-1)
    for document, length in ((0, 5), (2, 4)):
        rows = document_T == document
        share = torch.nn.functional.one_hot(chosen[rows], experts).sum((0, 1)) / (length * topk)
        wanted = wanted + coefficient * length / total * experts * (share * probs[rows].mean(0)).sum()
    (theirs,) = torch.autograd.grad(wanted, scores)
    assert replay.loss is not None and float(replay.loss) == pytest.approx(wanted.item(), rel=1e-6)
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-6)
    with torch.no_grad():
        replay.get_replay_topk(scores, topk, None, None, lambda s, k, **_: s.topk(k))
    assert float(replay.loss) == pytest.approx(wanted.item(), rel=1e-6)  # a pass without gradients counts nothing


def test_padding_counts_nothing() -> None:
    whole = batch([5, 3], [1.0, 1.0])
    assert trained_lengths(pad_batch(whole, 14)).tolist()[:2] == [5, 3]
    assert int(trained_lengths(pad_batch(whole, 14)).sum()) == 8


def refused() -> str:
    """What the engine says to a dense model with a balance."""
    from terrella.tests.parallel import jobs

    try:
        jobs.make_engine({}, balance=0.1)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_dense_model_has_nothing_to_balance() -> None:
    assert run_ranks("terrella.tests.models.test_balance:refused", 1) == [
        "optimizer.balance: the model has no experts; leave it at 0"
    ]


def train() -> list[float]:
    """The balance of each of 30 steps in which it is most of the loss."""
    from terrella.tests.parallel import jobs

    engine = jobs.make_engine({}, jobs.MOE, lr=1e-2, balance=1.0)
    return [engine.step(jobs.batches(2), jobs.cross_entropy).metrics["balance_loss"] for _ in range(30)]


def test_choices_become_even() -> None:
    """Two layers, each 1 where every expert is chosen equally often in every document."""
    (losses,) = run_ranks("terrella.tests.models.test_balance:train", 1)
    assert losses[0] > losses[-1] > 2 - 1e-3 and losses[-1] - 2 < 0.5 * (losses[0] - 2)
