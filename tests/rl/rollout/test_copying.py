"""Proposals by copying change no sample: not a token, not a log-prob beyond rounding, not a bit where rows do not
depend on their batch.
"""

import numpy as np
import pytest
import torch

from terrella.models.config import ModelConfig
from terrella.models.paged_decode import token_bytes
from terrella.rl.rollout import embedded
from terrella.rl.rollout.config import Embedded
from terrella.rl.rollout.copying import LONGEST_PAUSE, MOST_TOKENS, TRIAL, Copying
from terrella.rl.rollout.embedded import EmbeddedSampler
from terrella.rl.rollout.sampler import Sample, SampleRequest, SamplingParams
from terrella.tests.rl.rollout.test_embedded_sampler import weights

SMALL = ModelConfig(layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, ffn=16, vocab=11, max_positions=128, qkv_bias=True)  # noqa: E501  # fmt: skip


@pytest.fixture(autouse=True)
def small_pages(monkeypatch) -> None:
    monkeypatch.setattr(embedded, "PAGE", 4)


def model(seed: int) -> dict[str, torch.Tensor]:
    named = weights(SMALL, seed)
    return {name: x for name, x in named.items() if "q_layernorm" not in name and "k_layernorm" not in name}


def sampler(named: dict[str, torch.Tensor], copy: int | None, **options) -> EmbeddedSampler:
    return EmbeddedSampler(lambda: named, SMALL, version=lambda: 3, copy=copy, **options)


def any_requests(draw: np.random.Generator, **options) -> list[SampleRequest]:
    """Texts that repeat themselves, in groups, with every setting that a row may have."""
    made = []
    for i in range(draw.integers(2, 7)):
        if i % 2 == 0:
            piece = draw.integers(0, 11, draw.integers(1, 6)).tolist()
            prompt = tuple((piece * 12)[: draw.integers(1, 30)])
        limit = int(draw.integers(1, 40))
        places = sorted({int(n) for n in draw.integers(1, 40, draw.integers(0, 3)) if n < limit})
        forced = tuple((at, tuple(draw.integers(0, 11, draw.integers(1, 6)).tolist())) for at in places)
        params = SamplingParams(
            limit,
            temperature=float(draw.choice([0.0, 0.05, 0.3, 1.0])),
            stop_ids=((), (1,), (2, 3, 7))[draw.integers(3)],
            allowed=(1, 9) if draw.random() < 0.2 else None,
            top_k=int(draw.choice([0, 0, 2])),
            top_p=float(draw.choice([1.0, 1.0, 0.7])),
            **options,
        )
        made.append(SampleRequest(prompt, (int(draw.integers(10**9)), i), params, forced))
    return made


def same(one: list, other: list, within: float = 2e-5) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert isinstance(a, Sample) and isinstance(b, Sample)
        assert (a.ids, a.finish, a.weight_version, a.given) == (b.ids, b.finish, b.weight_version, b.given)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=within)


def compare(cases: range) -> dict[str, float]:
    """Plain steps against copies, in rooms of all sizes; what was copied in all. In fp64, where no random number
    falls between two roundings.
    """
    tokens, copied, preempted = 0, 0.0, 0.0
    for case in cases:
        draw = np.random.default_rng(case)
        named, asked = {name: x.double() for name, x in model(case).items()}, any_requests(draw)
        least = max(r.length for r in asked) + 24
        room = least + int(draw.integers(0, 40)) if case % 2 else None
        gib = None if room is None else (room + 0.5) * token_bytes(SMALL, torch.float64) / 2**30
        mine = sampler(named, int(draw.integers(1, 16)), cache_gib=gib, keep=True, max_batch=int(draw.integers(1, 9)))
        expected = sampler(named, 0, continuous=True).generate(asked)
        for _ in range(1 + case % 3 // 2):  # some once more, on kept pages
            same(mine.generate(asked), expected, 1e-6)
        tokens += mine._use.made
        copied += mine._use.copied
        preempted += mine._use.preempted
    return {"tokens": tokens, "copied": copied / tokens, "preempted": preempted}


def test_no_token_changes() -> None:
    seen = compare(range(6))
    assert seen["copied"] > 0.2, seen


@pytest.mark.full
def test_no_token_changes_over_hundreds_of_models() -> None:
    seen = compare(range(6, 306))
    assert seen["tokens"] > 15_000 and seen["copied"] > 0.2 and seen["preempted"] > 10, seen


def test_batch_invariant_copies_are_the_same_bits() -> None:
    named, asked = model(1), any_requests(np.random.default_rng(4))[:3]
    mine = sampler(named, 3, batch_invariant=True, keep=True)
    assert mine.generate(asked) == sampler(named, 0, batch_invariant=True).generate(asked)
    assert mine.rest()["time/copied"] > 0.1


def test_a_penalty_turns_copies_off() -> None:
    named, asked = model(2), any_requests(np.random.default_rng(3), repetition_penalty=1.5)
    mine = sampler(named, 5, keep=True)
    same(mine.generate(asked), sampler(named, 0).generate(asked))
    assert mine.rest()["time/copied"] == 0.0


def repeating(count: int) -> list[SampleRequest]:
    return [SampleRequest((1, 2, 3) * 6, (i,), SamplingParams(100, temperature=0.0)) for i in range(count)]


def test_left_to_itself_it_copies_where_that_pays(monkeypatch) -> None:
    monkeypatch.setattr(embedded, "copying_of", lambda setting, config, device: Copying(setting, config))
    named = model(0)
    mine = sampler(named, None, continuous=True, keep=True)
    same(mine.generate(repeating(3)), sampler(named, 0).generate(repeating(3)))  # greedy texts end in a loop
    seen = mine.rest()
    assert seen["time/copied"] > 0.5 and seen["time/calls_per_token"] < 0.6, seen
    hot = [SampleRequest(r.ids, r.key, SamplingParams(60, temperature=20.0)) for r in repeating(3)]
    same(mine.generate(hot), sampler(named, 0).generate(hot))  # about as good as random: nothing to copy
    assert mine.rest()["time/calls_per_token"] > 0.8


def test_a_cache_that_proposals_do_not_fit_is_used_without() -> None:
    named, asked = model(0), repeating(1)
    gib = (asked[0].length + 7.5) * token_bytes(SMALL, torch.float32) / 2**30
    mine = sampler(named, 15, cache_gib=gib, keep=True)
    same(mine.generate(asked), sampler(named, 0).generate(asked))
    assert mine.rest()["time/copied"] == 0.0


def test_when_it_is_tried() -> None:
    """By batch size and by what was seen: small batches copy, and what does not pay is tried ever more rarely."""
    large = ModelConfig(layers=28, hidden=1536, heads=12, kv_heads=2, head_dim=128, ffn=8960, vocab=151936)
    choice = Copying(None, large)
    assert [choice.ahead(rows) for rows in (8, 64, 1024, 4096)] == [15, 7, 0, 0]
    assert choice.cost(64, 7) == pytest.approx(2, rel=0.1) and choice.passes(100) == TRIAL
    pauses = []
    for _ in range(6):
        choice.saw(64, 7, made=150, passes=100)
        assert choice.ahead(64) == 0
        pauses.append(choice.pause)
        while choice.pause:
            choice.went_plain()
        assert choice.ahead(64) == 7
    assert pauses == [1, 2, 4, 8, 16, 16] and pauses[-1] == LONGEST_PAUSE
    choice.saw(64, 7, made=500, passes=100)
    assert choice.ahead(64) == 7 and choice.passes(1000) == 8 and choice.passes(10) == 2
    fixed = Copying(5, large)
    fixed.saw(64, 5, made=100, passes=100)
    assert fixed.ahead(64) == 5 and fixed.ahead(MOST_TOKENS // 6 + 1) == 0


def test_the_setting_is_checked() -> None:
    assert Embedded(copy=None).copy is None and Embedded().copy == 0
    for wrong in (-1, 16):
        with pytest.raises(ValueError, match="copy"):
            Embedded(copy=wrong)
