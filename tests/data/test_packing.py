"""Packing loses nothing, shifts once, balances ranks, and leaves loss and gradients exactly as one by one."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terrella.core.layout import pad_batch
from terrella.data.packing import TrainSequence, pack, plan_batches, plan_ranks, role_weight, unpack
from terrella.data.trajectory import Role, TokenSequence


def make(lengths, seed=0, vocab=17):
    rng = np.random.default_rng(seed)
    made = []
    for n in lengths:
        ce = rng.integers(0, 3, n).astype(np.float32)
        ce[0] = 0
        advantage = rng.normal(size=n).astype(np.float32)
        made.append(
            TrainSequence(
                rng.integers(0, vocab, n), ce=ce, pg=ce / 2, advantage=advantage, old_logprob=-np.abs(advantage)
            )
        )
    return made


@given(st.lists(st.integers(2, 40), min_size=1, max_size=30), st.integers(40, 90))
@settings(max_examples=60, deadline=None)
def test_every_token_is_there_once(lengths, budget):
    sequences = make(lengths)
    batches = pack(sequences, budget=budget)
    for batch in batches:
        assert batch.num_tokens <= budget
        assert int(batch.cu_seqlens_D1[-1]) == batch.num_tokens and batch.cu_seqlens_D1.dtype == torch.int32
        edges = batch.cu_seqlens_D1.tolist()
        assert batch.max_seqlen == max(b - a for a, b in itertools.pairwise(edges))
        for which, first, last in zip(batch.sequence_ids, edges, edges[1:]):
            s = sequences[which]
            assert batch.tokens_T[first:last].tolist() == s.ids[:-1].tolist()
            assert batch.targets_T[first:last].tolist() == s.ids[1:].tolist()
            assert batch.positions_T[first:last].tolist() == list(range(last - first))
            assert np.array_equal(batch.ce_weight_T[first:last].numpy(), s.ce[1:])
            assert np.array_equal(batch.advantage_T[first:last].numpy(), s.advantage[1:])
        assert len(batch.sequence_ids) == len(edges) - 1 and batch.kl_weight_T is None
    assert sorted(i for b in batches for i in b.sequence_ids) == list(range(len(lengths)))
    back = unpack(batches, [b.old_logprob_T for b in batches])
    assert list(back) == list(range(len(lengths)))
    for i, s in enumerate(sequences):
        assert np.array_equal(back[i][1:], s.old_logprob[1:]) and back[i][0] == 0


@given(st.lists(st.integers(2, 60), min_size=1, max_size=40), st.integers(1, 8), st.integers(60, 128))
@settings(max_examples=60, deadline=None)
def test_ranks_get_equally_many(lengths, ranks, budget):
    for each in (1, 2):
        shares = plan_ranks(np.array(lengths) - 1, ranks=ranks, budget=budget, each=each)
        assert len({len(s) for s in shares}) == 1 and len(shares) == ranks and len(shares[0]) % each == 0
        assert sorted(int(i) for s in shares for b in s for i in b) == list(range(len(lengths)))


def test_balance_by_attention_cost():
    rng = np.random.default_rng(1)
    sizes = np.minimum(rng.lognormal(6.5, 0.9, 2000).astype(int) + 2, 16384)
    shares = plan_ranks(sizes, ranks=8, budget=16384, hidden=896)
    cost = sizes + sizes.astype(float) ** 2 / (12 * 896)
    totals = [sum(cost[b].sum() for b in share) for share in shares]
    assert max(totals) / (sum(totals) / 8) < 1.02


def test_best_fit_beats_file_order_and_is_full():
    rng = np.random.default_rng(0)
    sizes = rng.integers(500, 6000, 500)
    bins = plan_batches(sizes, 16384)
    assert sizes.sum() / (len(bins) * 16384) > 0.98
    in_order, free = 1, 16384
    for size in sizes:
        if size > free:
            in_order, free = in_order + 1, 16384
        free -= size
    assert len(bins) < in_order


def test_text_game_lengths():
    """Lengths of the 442 public text-game rows in SmolLM2 tokens, for four ways of writing a row; the rows are not
    shipped.
    """
    told = json.loads(Path(__file__).with_name("text_game_lengths.json").read_text())
    share = {}
    for name, lengths in told.items():
        sizes = np.array(lengths) - 1
        bins = plan_batches(sizes, 16384)
        assert sorted(np.concatenate(bins).tolist()) == list(range(442)) and max(sizes[b].sum() for b in bins) <= 16384
        most_together = int(np.searchsorted(np.cumsum(np.sort(sizes)), 16384, side="right"))
        bound = max(-(-int(sizes.sum()) // 16384), -(-len(sizes) // most_together))
        assert len(bins) <= bound + 1, name
        share[name] = sizes.sum() / (len(bins) * 16384)
    # state, action and next state
    assert share["transition"] >= 0.98
    # the whole prompt with its two worked examples: two of them fit a batch and never three, so 78.5 % is the most
    # there is
    assert share["prompt_and_answer"] > 0.784


def test_mistakes_are_named():
    ids = np.arange(5)
    with pytest.raises(ValueError, match="sequence 0: ce weighs its first id"):
        pack([TrainSequence(ids, ce=np.ones(5))])
    with pytest.raises(ValueError, match="sequence 1: ce has 4 entries for 5 ids"):
        pack([TrainSequence(ids, ce=np.zeros(5)), TrainSequence(ids, ce=np.zeros(4))])
    with pytest.raises(ValueError, match="sequence 0: advantage is nan"):
        pack([TrainSequence(ids, advantage=np.array([0, 0, np.nan, 0, 0]))])
    with pytest.raises(ValueError, match="fewer than 2 ids"):
        pack([TrainSequence(np.array([1]))])
    with pytest.raises(ValueError, match="no sequence has advantage"):
        pack([TrainSequence(ids, pg=np.array([0, 1, 1, 1, 1.0]))])
    with pytest.raises(ValueError, match="needs 4 positions, the budget is 3"):
        pack([TrainSequence(ids)], budget=3)


def test_roles_become_weights():
    sequence = TokenSequence((5, 6, 7, 8), (Role.ACTION, Role.PROMPT, Role.ACTION, Role.ACTION))
    assert role_weight(sequence, Role.ACTION, 0.5).tolist() == [0, 0, 0.5, 0.5]
    made = TrainSequence.of(sequence, ce=role_weight(sequence, Role.ACTION))
    (batch,) = pack([made], budget=6)
    assert batch.num_tokens == 3 and batch.ce_weight_T.tolist() == [0, 1, 1]


def documents(batch):
    edges = batch.cu_seqlens_D1.tolist()
    return torch.repeat_interleave(
        torch.arange(len(edges) - 1), torch.tensor([b - a for a, b in itertools.pairwise(edges)])
    )


def loss_and_gradients(batches, parameters, softmax):
    """A small causal model over documents; without softmax every number is an integer, so that sums are exact in any
    order.
    """
    for p in parameters:
        p.grad = None
    total = torch.zeros((), dtype=torch.float64)
    table, mix, head, position = parameters
    for batch in batches:
        doc = documents(batch)
        n = batch.num_tokens
        seen = (doc[:, None] == doc[None, :]) & torch.ones(n, n, dtype=torch.bool).tril()
        x = table[batch.tokens_T] + position[batch.positions_T]
        if softmax:
            attention = torch.softmax((x @ mix @ x.T).masked_fill(~seen, -torch.inf), -1)
            logprob = torch.log_softmax((x + attention @ x) @ head, -1)
            terms = -logprob.gather(1, batch.targets_T[:, None])[:, 0]
        else:
            hidden = seen.double() @ x @ mix
            terms = (hidden @ head).gather(1, batch.targets_T[:, None])[:, 0]
        loss = (terms * batch.ce_weight_T).sum()
        loss.backward()
        total += loss.detach()
    return total, [p.grad.clone() for p in parameters]


@pytest.mark.parametrize("softmax", [False, True], ids=["integers", "softmax"])
def test_packed_equals_one_by_one(softmax):
    sequences = [TrainSequence(s.ids, ce=s.ce) for s in make([2, 9, 17, 5, 31, 12, 3, 24], seed=3)]
    generator = torch.Generator().manual_seed(0)

    def weights(*shape):
        if softmax:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        return torch.randint(-3, 4, shape, generator=generator).double().requires_grad_()

    parameters = [weights(17, 6), weights(6, 6), weights(6, 17), weights(40, 6)]
    singly = [b for s in sequences for b in pack([s])]
    expected, gradients = loss_and_gradients(singly, parameters, softmax)
    for batches in (pack(sequences, budget=40), pack(sequences), [pad_batch(pack(sequences)[0], 128)]):
        loss, found = loss_and_gradients(batches, parameters, softmax)
        if softmax:
            torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
            for a, b in zip(found, gradients):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
        else:
            assert torch.equal(loss, expected) and all(torch.equal(a, b) for a, b in zip(found, gradients))
