"""Sampled log-probs beside the engine's score of the same tokens, run in a rank of the pool."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from terrella.core.batch import PackedBatch
from terrella.core.config import OptimizerConfig, ParallelConfig, PrecisionConfig
from terrella.core.engine import Engine
from terrella.data.packing import TrainSequence, pack, role_weight
from terrella.data.trajectory import Role
from terrella.kernels.batch_invariant import batch_invariant
from terrella.models.config import ModelConfig
from terrella.models.gpt import build_gpt
from terrella.models.lora import LoraConfig
from terrella.rl.algorithms import settings
from terrella.rl.algorithms.config import SFT
from terrella.rl.objective import logprob_score, make_loss
from terrella.rl.rollout.config import Embedded
from terrella.rl.rollout.embedded import EmbeddedSampler
from terrella.rl.rollout.episodes import sampled_sequence
from terrella.rl.rollout.open import open_sampler, sampling_weights
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
    sampler = EmbeddedSampler(sampling_weights(engine), model, batch_invariant=True)
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


def loads(lora: bool) -> list[float]:
    """How far the sampler is from the trainer at first, after other weights were loaded, and after a checkpoint gave
    the first ones back: all within one step.
    """
    build = build_gpt(MODEL, lora=LoraConfig(rank=4, alpha=8.0) if lora else None)
    engine = Engine(build, ParallelConfig(), OptimizerConfig(), PrecisionConfig(), 0)
    folder = Path(tempfile.mkdtemp())
    engine.save(folder / "first")
    others = {name: tensor.detach() + 0.1 for name, tensor in engine.parameters()}
    opened = open_sampler(Embedded(copy=1), engine, MODEL, folder)  # copy: one batch on a CPU too
    asked = [SampleRequest(tuple(range(1, 20)), (i,), SamplingParams(8)) for i in range(2)]
    found = []
    for change in (lambda: None, lambda: engine.load_weights(others.get), lambda: engine.load(folder / "first")):
        change()
        pairs = [(r, s) for r, s in zip(asked, opened.sampler.generate(asked), strict=True) if isinstance(s, Sample)]
        found.append(max(abs(gap) for gap in gaps(engine, pairs, 1.0)))
    opened.close()
    return found


def adapters(steps: int = 3) -> list[dict[str, Any]]:
    """Adapters that are trained between rollouts of two turns each: what every rollout computed anew, how far its
    log-probs are from the trainer's, and which graphs and tensors it used.
    """
    engine = Engine(
        build_gpt(MODEL, lora=LoraConfig(rank=4, alpha=8.0)),
        ParallelConfig(),
        OptimizerConfig(lr=3e-2),
        PrecisionConfig(),
        0,
    )
    opened = open_sampler(Embedded(copy=1), engine, MODEL, Path(tempfile.mkdtemp()))  # copy: one batch on a CPU too
    sampler, rest, loss, found = opened.sampler, opened.rest, make_loss(settings(SFT(), 1.0)), []
    assert isinstance(sampler, EmbeddedSampler) and rest is not None
    for _ in range(steps):
        asked = [SampleRequest(tuple(range(1, 20 + i)), (i, 0), SamplingParams(8)) for i in range(6)]
        pairs = [(r, s) for r, s in zip(asked, sampler.generate(asked), strict=True) if isinstance(s, Sample)]
        later = [SampleRequest((*r.ids, *s.ids, 5), (*r.key, 1), r.params) for r, s in pairs]
        pairs += [(r, s) for r, s in zip(later, sampler.generate(later), strict=True) if isinstance(s, Sample)]
        found.append({
            "reuse": rest()["time/prompt_reuse"],
            "worst": max(abs(gap) for gap in gaps(engine, pairs, 1.0)),
            "used": id(sampler._step),
            "weights": {name: tensor.data_ptr() for name, tensor in sampler.weights().items()},
            "sum": float(sum(tensor.double().sum() for tensor in sampler.weights().values())),
        })  # fmt: skip
        sequences = [sampled_sequence(request.ids, sample) for request, sample in pairs]
        rows = [TrainSequence.of(x, ce=role_weight(x, Role.ACTION, 0.01)) for x in sequences]
        engine.step(pack(rows, budget=64), loss)
    opened.close()
    return found
