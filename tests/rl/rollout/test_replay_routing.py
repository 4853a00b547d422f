"""Router replay: the sampler tells the experts of every token, and the trainer uses them, whatever it would choose."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from terrella.core.errors import ConfigError
from terrella.core.layout import pad_batch
from terrella.data.packing import TrainSequence, pack
from terrella.data.trajectory import Role, Routing, TokenSequence
from terrella.models.gpt import initial_weight
from terrella.rl.journal import Journal
from terrella.rl.multiturn import joined
from terrella.rl.rollout import embedded
from terrella.rl.rollout.embedded import EmbeddedSampler
from terrella.rl.rollout.forced_spans import Piece, Plain, generate_in_spans
from terrella.rl.rollout.sampler import Sample, SampleRequest, SamplingParams
from terrella.rl.rollout.vllm_config import VllmSettings, noted
from terrella.tests.parallel.pool import run_ranks
from terrella.tests.rl.invariant_jobs import EXPERTS
from terrella.tests.rl.rollout.routing_jobs import shapes
from terrella.tests.rl.rollout.test_continuous import gib, mixed

NAMED = {name: initial_weight(name, shape, 0, 0.3) for name, shape in shapes(EXPERTS).items()}


@pytest.fixture(autouse=True)
def small_pages(monkeypatch) -> None:
    monkeypatch.setattr(embedded, "PAGE", 4)


def sampler(**options) -> EmbeddedSampler:
    return EmbeddedSampler(lambda: NAMED, EXPERTS, notes=True, **options)


WAVES = sampler(continuous=False)


def agree(asked: list[SampleRequest], found: list, expected: list) -> None:
    for request, a, b in zip(asked, found, expected, strict=True):
        assert a.ids == b.ids
        one, other = a.experts.array(), b.experts.array()
        assert one.shape == other.shape == (len(request.ids) + len(a.ids), 2, 2)
        assert (one[-1] == -1).all() and (one[:-1, 0] >= 0).all()
        # the last layer of a token counts where the next one is sampled
        sampled = [i + len(request.ids) - 1 for i, given in enumerate(a.given) if not given]
        assert (one[sampled] >= 0).all() and (other[sampled] >= 0).all()
        np.testing.assert_array_equal(one[one >= 0], other[one >= 0])


@pytest.mark.parametrize("options", [{}, {"cache_gib": 40}, {"max_batch": 2}, {"keep": True}, {"copy": 3}])
def test_pages_and_waves_tell_the_same_experts(options) -> None:
    if "cache_gib" in options:
        options = {"cache_gib": gib(options["cache_gib"])}
    for asked in (mixed(17, stop_ids=(3, 8)), mixed(12)):
        expected, paged = WAVES.generate(asked), sampler(continuous=True, **options)
        for _ in range(2):  # the second time on kept pages
            agree(asked, paged.generate(asked), expected)
    assert all(s.experts is None for s in EmbeddedSampler(lambda: NAMED, EXPERTS).generate(asked))


def test_turns_keep_what_was_chosen_when_they_were_sampled() -> None:
    def routed(n: int, number: int) -> Routing:
        chosen = np.full((n, 2, 2), number, np.int16)
        chosen[-1] = -1
        return Routing.of(chosen)

    first = Sample((5, 6), (-1.0, -1.0), "stop", 0, experts=routed(4, 1))
    second = Sample((8,), (-1.0,), "stop", 0, experts=routed(6, 2))
    (sequence,) = joined([((1, 2), first), ((1, 2, 5, 6, 7), second)])
    assert sequence.experts is not None
    assert sequence.experts.array()[:, 0, 0].tolist() == [1, 1, 1, 2, 2, -1]
    (moved,) = joined([((1, 2), first)])
    assert moved.experts == first.experts
    mixed_, *_ = joined([((1, 2), first), ((1, 2, 5, 6, 7), replace(second, experts=None))])
    assert mixed_.experts is not None and mixed_.experts.array()[:, 0, 0].tolist() == [1, 1, 1, -1, -1, -1]


def test_choices_follow_their_tokens_into_batches() -> None:
    chosen = np.arange(4 * 2 * 2, dtype=np.int16).reshape(4, 2, 2)
    roles = (Role.PROMPT, Role.ACTION, Role.ACTION, Role.ACTION)
    with_, without = TokenSequence((4, 5, 6, 7), roles, experts=Routing.of(chosen)), TokenSequence((1, 2), roles[:2])
    (batch,) = pack([TrainSequence.of(without), TrainSequence.of(with_)], budget=6)
    assert batch.experts_T is not None and batch.tokens_T.tolist() == [1, 4, 5, 6]
    assert batch.experts_T[:, 0, 0].tolist() == [-1, 0, 4, 8]
    assert pad_batch(batch, 8).experts_T[:, 1, 1].tolist() == [-1, 3, 7, 11, -1, -1, -1, -1]
    other = replace(with_, experts=Routing.of(chosen[:, :1]))
    with pytest.raises(ValueError, match="different models"):
        pack([TrainSequence.of(with_), TrainSequence.of(other)])
    with pytest.raises(ValueError, match="experts of 3 tokens"):
        replace(with_, experts=Routing.of(chosen[:3]))


def test_an_engine_of_plain_continuations() -> None:
    """Each span is a continuation of its own: what an earlier one read keeps the choices of then."""

    def answer(plain: list[Plain]) -> list:
        made = []
        for p in plain:
            ids = tuple(range(50, 50 + p.limit))
            told = np.full((len(p.ids) + len(ids) - 1, 2, 2), len(p.ids), np.uint8)
            made.append(Piece(ids, (-1.0,) * len(ids), "length", noted(told, len(p.ids) + len(ids), "vllm")))
        return made

    request = SampleRequest((1, 2, 3), (0,), SamplingParams(4), ((2, (7, 8)),))
    (sample,) = generate_in_spans([request], answer, 0)
    assert isinstance(sample, Sample) and sample.experts is not None and sample.ids == (50, 51, 7, 8, 50, 51)
    assert sample.experts.array()[:, 0, 0].tolist() == [3, 3, 3, 3, 7, 7, 7, 7, -1]
    assert VllmSettings("m", notes=True).engine_arguments()["enable_return_routed_experts"] is True
    for told in (None, np.zeros((2, 2, 2), np.uint8)):
        with pytest.raises(ConfigError, match=r"rollouts\.replay_routing"):
            noted(told, 9, "vllm")


def test_an_engine_that_cannot_tell_is_refused() -> None:
    (message,) = run_ranks("terrella.tests.rl.rollout.routing_jobs:vllm_on_cpu", 1)
    assert "rollouts.replay_routing: vLLM on a CPU" in message


def test_the_journal_keeps_them(tmp_path) -> None:
    asked = mixed(6)
    found = WAVES.generate(asked)
    Journal(tmp_path).add(asked, found)
    kept = Journal(tmp_path).samples(strict=True)
    assert [sample.experts for sample in kept.values()] == [sample.experts for sample in found]


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"pipeline": 2},
        {"expert": 2},
        {"context": 2},
        {"tensor": 2, "sequence_parallel": True},
        {"pipeline": 2, "recompute": "full"},
    ],
    ids=lambda layout: "-".join(layout) or "one",
)
def test_routers_use_given_choices_at_every_layout(layout) -> None:
    """Random choices, which no router would make: every token goes to these, and what comes out is one rank's."""
    (one,) = run_ranks("terrella.tests.rl.rollout.routing_jobs:given", 1)
    found = run_ranks("terrella.tests.rl.rollout.routing_jobs:given", 2 if layout else 1, **layout)
    assert one["given"] == found[0]["given"] > 0 and one["disagreed"] == found[0]["disagreed"] > 0
    assert sum(rank["tokens"] for rank in found) == one["tokens"] > 0  # (token, layer) pairs that routers saw
    assert all(rank["wrong"] == 0 for rank in found)
    assert abs(one["loss"] - found[0]["loss"]) < 2e-6 * abs(one["loss"])
    assert abs(one["grad_norm"] - found[0]["grad_norm"]) < 2e-6 * one["grad_norm"]
    assert abs(one["loss"] - one["own"]) > 1e-3  # what they would have chosen gives another loss


def test_a_wrong_shape_is_refused() -> None:
    (message,) = run_ranks("terrella.tests.rl.rollout.routing_jobs:misfit", 1)
    assert "rollouts.replay_routing" in message and "3 layers" in message


def test_bf16_and_older_weights() -> None:
    """Sampled by weights of a step ago, trained in bf16: routers would disagree, and do not."""
    (found,) = run_ranks("terrella.tests.rl.rollout.routing_jobs:older", 1)
    assert found["disagreed"] > 0 and found["wrong"] == 0 and found["tokens"] > 0
    assert torch.isfinite(torch.tensor(found["loss"]))
