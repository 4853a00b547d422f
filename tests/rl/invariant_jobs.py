"""Sampled log-probs beside the engine's score of the same tokens, run in a rank of the pool."""

from __future__ import annotations

import torch

from terrella.core.batch import PackedBatch
from terrella.core.config import ParallelConfig, PrecisionConfig
from terrella.core.engine import Engine
from terrella.kernels.batch_invariant import batch_invariant
from terrella.models.config import ModelConfig
from terrella.models.gpt import build_gpt
from terrella.rl.objective import logprob_score
from terrella.rl.rollout.embedded import EmbeddedSampler
from terrella.rl.rollout.open import sampling_weights
from terrella.rl.rollout.sampler import Sample, SampleRequest, SamplingParams

MODEL = ModelConfig(
    family="qwen2", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=64, max_positions=64, qkv_bias=True, tied=True,  # noqa: E501
    init_std=0.3,
)  # fmt: skip


EXPERTS = ModelConfig(
    family="qwen3_moe", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=64, max_positions=64,
    qk_norm=True, experts=8, experts_per_token=2, expert_ffn=16, init_std=0.3,
)  # fmt: skip


def packed(sequences: list[tuple[int, ...]]) -> PackedBatch:
    """Whole sequences as one batch; each position's target is the next token."""
    lengths = [len(ids) for ids in sequences]
    return PackedBatch(
        tokens_T=torch.tensor([t for ids in sequences for t in ids]),
        targets_T=torch.tensor([t for ids in sequences for t in (*ids[1:], ids[0])]),
        positions_T=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens_D1=torch.tensor([0, *lengths]).cumsum(0).int(),
        max_seqlen=max(lengths),
    )


def gaps(engine: Engine, pairs: list[tuple[SampleRequest, Sample]], temperature: float) -> list[float]:
    """Differences of sampler and trainer for every sampled token of one batch of the trainer's."""
    (scored,) = engine.score(
        [packed([request.ids + sample.ids for request, sample in pairs])], logprob_score(temperature)
    )
    found, at = [], 0
    for request, sample in pairs:
        theirs = scored["logprob"][at + len(request.ids) - 1 :].tolist()
        found += [p - q for p, q, given in zip(sample.logprobs, theirs, sample.given, strict=False) if not given]
        at += len(request.ids) + len(sample.ids)
    return found


def compare(experts: bool = False) -> dict[str, float]:
    """Tokens and how many of them differ in a bit: under the mode, in a large and in a small batch; and the worst
    gap without it.
    """
    model = EXPERTS if experts else MODEL
    engine = Engine(build_gpt(model), ParallelConfig(), None, PrecisionConfig(), 0)
    sampler = EmbeddedSampler(lambda: sampling_weights(engine), model, batch_invariant=True)
    forced = ((2, (3, 4)),)
    asked = [
        SampleRequest(tuple(range(1, 3 + i)), (i,), SamplingParams(6 + i), forced if i % 2 else ()) for i in range(6)
    ]
    pairs = [(r, s) for r, s in zip(asked, sampler.generate(asked), strict=True) if isinstance(s, Sample)]
    with batch_invariant():
        large, small = gaps(engine, pairs, 1.0), gaps(engine, pairs[2:3], 1.0)
    usual = gaps(engine, pairs, 1.0)
    return {
        "tokens": len(large),
        "unequal": sum(g != 0 for g in large + small),
        "worst_without": max(abs(g) for g in usual),
    }
