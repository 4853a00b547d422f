"""Copied proposals on a GPU: the samples of plain steps, bit for bit where rows do not depend on their batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from terrella.rl.rollout.embedded import EmbeddedSampler
from terrella.rl.rollout.sampler import Sample, SampleRequest, SamplingParams
from terrella.tests.rl.rollout.test_continuous_gpu import CONFIG, named

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def asked(n: int) -> list[SampleRequest]:
    """Prompts that repeat themselves, in groups of four, and few ids to choose from: much can be copied."""
    made = []
    for i in range(n):
        piece = [(7 * (i // 4) + 3 * j) % 24 for j in range(5 + i // 4 % 9)]
        prompt = tuple((piece * 40)[: 20 + 37 * (i // 4) % 300])
        forced = ((5, tuple(range(13))), (40, (7,))) if i % 8 < 4 else ()
        params = SamplingParams(
            60 + i // 4 % 5 * 19,
            temperature=(0.0, 0.1, 0.4, 1.0)[i % 4],
            stop_ids=(5,) if i % 3 == 0 else (),
            allowed=(0, 24),
            top_k=8 if i % 5 == 0 else 0,
            top_p=0.9 if i % 7 == 0 else 1.0,
        )
        made.append(SampleRequest(prompt, (3, i // 4, i % 4, 0), params, forced))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ahead", [1, 7, 15])
def test_batch_invariant_copies_are_the_same_bits(dtype: torch.dtype, ahead: int) -> None:
    there = named(CONFIG, dtype, "cuda")
    requests = asked(72)
    plain = EmbeddedSampler(lambda: there, CONFIG, batch_invariant=True, copy=0).generate(requests)
    mine = EmbeddedSampler(lambda: there, CONFIG, batch_invariant=True, copy=ahead, keep=True)
    assert mine.generate(requests) == plain
    assert mine.generate(requests) == plain  # on kept pages, by the graphs of before
    seen = mine.rest()
    assert seen["time/copied"] > 0.1 and seen["time/calls_per_token"] < 0.9, seen


def test_copies_when_pages_run_out_are_the_same_bits() -> None:
    there = named(CONFIG, torch.float32, "cuda")
    requests = [
        SampleRequest(r.ids[:60], r.key, replace(r.params, max_new_tokens=300, stop_ids=()), r.forced)
        for r in asked(96)
    ]
    plain = EmbeddedSampler(lambda: there, CONFIG, batch_invariant=True, copy=0).generate(requests)
    tight = EmbeddedSampler(lambda: there, CONFIG, batch_invariant=True, copy=7, keep=True, cache_gib=0.012)
    assert tight.generate(requests) == plain
    seen = tight.rest()
    assert seen["time/preempted"] > 0 and seen["time/copied"] > 0.1, seen


@pytest.mark.parametrize("copy", [7, None])
def test_fp32_copies_are_the_plain_samples(copy: int | None) -> None:
    """With products in tiles that depend on the batch a random number may fall between two roundings."""
    there = named(CONFIG, torch.float32, "cuda")
    requests = asked(64)
    plain = EmbeddedSampler(lambda: there, CONFIG, copy=0).generate(requests)
    mine = EmbeddedSampler(lambda: there, CONFIG, copy=copy, keep=True)
    found = mine.generate(requests)
    equal = []
    for a, b, request in zip(found, plain, requests, strict=True):
        assert isinstance(a, Sample) and isinstance(b, Sample)
        equal.append(a.ids == b.ids)
        if equal[-1]:
            assert a.finish == b.finish and a.given == b.given
            if request.params.temperature in (0.0, 1.0):  # others enlarge what rounding does to logits
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-4)
    assert np.mean(equal) > 0.97, np.mean(equal)
    seen = mine.rest()
    print(seen)
    assert copy is None or seen["time/copied"] > 0.1, seen
