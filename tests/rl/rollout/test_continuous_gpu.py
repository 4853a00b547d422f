"""The continuous batch on a GPU: graphs and kernels give the CPU's samples in fp32, and the whole forward's
log-probs in bf16.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from terrella.kernels.batch_invariant import batch_invariant
from terrella.models.config import ModelConfig
from terrella.models.decode import Decoder, KVCache, decode_weights
from terrella.rl.rollout.embedded import EmbeddedSampler
from terrella.rl.rollout.open import sampling_weights
from terrella.rl.rollout.sampler import Sample, SampleRequest, SamplingParams
from terrella.tests.rl.invariant_jobs import gaps
from terrella.tests.rl.rollout.test_embedded_sampler import weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CONFIG = ModelConfig(
    layers=3,
    hidden=256,
    heads=6,
    kv_heads=2,
    head_dim=64,
    ffn=384,
    vocab=9008,
    max_positions=1024,
    qkv_bias=True,
    qk_norm=True,
)


def named(config: ModelConfig, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    return {name: (x * (0.3 if x.ndim == 2 else 1)).to(device, dtype) for name, x in weights(config).items()}


def asked(n: int, **options) -> list[SampleRequest]:
    made = []
    for i in range(n):
        prompt = tuple((11 * (i // 4) + 3 * j) % 9008 for j in range(1 + 97 * (i // 4) % 400))
        forced = ((5, tuple(range(13))), (20, (7,))) if i % 8 < 4 else ()
        params = SamplingParams(24 + i // 4 % 5 * 9, temperature=(1.0, 0.0, 0.7, 1.0)[i % 4], **options)
        made.append(SampleRequest(prompt, (3, i // 4, i % 4, 0), params, forced))
    return made


@pytest.mark.parametrize(
    "config", [CONFIG, replace(CONFIG, kv_heads=6, qk_norm=False, rotary_fraction=0.5, rotary_interleaved=True)]
)
def test_fp32_samples_equal_the_cpus(config: ModelConfig) -> None:
    torch.set_num_threads(1)
    here, there = named(config, torch.float32, "cpu"), named(config, torch.float32, "cuda")
    sampler = EmbeddedSampler(lambda: there, config)
    stops = asked(12, stop_ids=tuple(range(0, 9008, 40)))
    for requests in (asked(40), stops, asked(6, top_k=50), asked(12, top_p=0.8), asked(6, repetition_penalty=1.3)):
        mine, theirs = sampler.generate(requests), EmbeddedSampler(lambda: here, config).generate(requests)
        equal = [
            a.ids == b.ids for a, b in zip(mine, theirs, strict=True) if isinstance(a, Sample) and isinstance(b, Sample)
        ]
        assert np.mean(equal) > 0.97, np.mean(equal)  # a random number may fall between two roundings
        for a, b in zip(mine, theirs, strict=True):
            assert isinstance(a, Sample) and isinstance(b, Sample)
            if a.ids == b.ids:
                assert a.finish == b.finish and a.given == b.given
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-4)


def test_pages_that_run_out_and_pages_that_are_kept_change_no_sample() -> None:
    """In the mode whose bits do not depend on the batch; elsewhere a random number may fall between two roundings."""
    there = named(CONFIG, torch.float32, "cuda")
    settings = [
        SamplingParams(200 + 40 * i, stop_ids=stop) for i in range(4) for stop in ((), tuple(range(0, 9008, 60)))
    ]
    requests = [SampleRequest(r.ids[:90], r.key, settings[i % 8]) for i, r in enumerate(asked(96))]
    plenty = EmbeddedSampler(lambda: there, CONFIG, batch_invariant=True).generate(requests)
    tight = EmbeddedSampler(lambda: there, CONFIG, cache_gib=0.01, keep=True, batch_invariant=True)
    again = tight.generate(requests)
    assert tight.rest()["time/preempted"] > 0
    kept = EmbeddedSampler(lambda: there, CONFIG, keep=True, batch_invariant=True)
    turns = []
    for sampler in (kept, EmbeddedSampler(lambda: there, CONFIG, batch_invariant=True)):
        first = sampler.generate(requests)
        longer = [
            SampleRequest(r.ids + s.ids + (5, 6, 7), (*r.key, 1), r.params)
            for r, s in zip(requests, first, strict=True)
        ]
        turns.append(sampler.generate(longer))
    assert kept.rest()["time/prompt_reuse"] > 0.9
    for one, other in ((plenty, again), turns):
        assert one == other


def test_bf16_logprobs_are_the_whole_forwards() -> None:
    there = named(CONFIG, torch.bfloat16, "cuda")
    sampler = EmbeddedSampler(lambda: there, CONFIG)
    requests = asked(300)
    samples = sampler.generate(requests)
    again = EmbeddedSampler(lambda: there, CONFIG, cache_gib=0.01).generate(requests)  # fewer at a time
    wide = {name: x.float() for name, x in there.items()}
    decoder = Decoder(decode_weights(wide, CONFIG), CONFIG, 1024)
    gaps = []
    for request, sample in [*zip(requests, samples, strict=True)][::23] + [*zip(requests, again, strict=True)][::23]:
        assert isinstance(sample, Sample)
        ids = torch.tensor([request.ids + sample.ids], device="cuda")
        hidden = decoder.forward(ids, KVCache(CONFIG, 1, 1024, decoder.weights.embedding))[0]
        logp = torch.log_softmax((hidden @ decoder.weights.head.T)[:, :9008] / (request.params.temperature or 1.0), -1)
        first = len(request.ids) - 1
        for i, (token, logprob, given) in enumerate(zip(sample.ids, sample.logprobs, sample.given, strict=True)):
            if not given:
                gaps.append(abs(float(logp[first + i, token]) - logprob))
    assert np.mean(gaps) < 0.03, np.mean(gaps)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_batch_invariant_logprobs_are_the_trainers_bits(qk_norm: bool) -> None:
    from terrella.benchmarks.rollout import random_engine

    family = "qwen3" if qk_norm else "qwen2"
    model = replace(
        CONFIG, family=family, hidden=512, layers=4, qk_norm=qk_norm, qkv_bias=not qk_norm, tied=True, init_std=0.05
    )
    engine = random_engine(model, lr=0)
    sampler = EmbeddedSampler(sampling_weights(engine), model, batch_invariant=True)
    requests = asked(90)
    samples = sampler.generate(requests)
    for temperature in (1.0, 0.7):
        chosen = [
            (r, s)
            for r, s in zip(requests, samples, strict=True)
            if isinstance(s, Sample) and r.params.temperature == temperature
        ]
        for pairs in (chosen, chosen[3:5]):  # a large and a small batch of the trainer
            with batch_invariant():
                assert set(gaps(engine, pairs, temperature)) == {0.0}
    usual = EmbeddedSampler(sampler.weights, model).generate(requests)
    assert any(a != b for a, b in zip(usual, samples, strict=True))  # without the mode the bits differ
