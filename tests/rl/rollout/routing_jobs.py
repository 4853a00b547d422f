"""Routers that are given the sampler's choices, run in ranks of the pool."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from terrella.core.batch import PackedBatch
from terrella.core.config import OptimizerConfig, ParallelConfig, PrecisionConfig
from terrella.core.engine import Engine
from terrella.core.errors import ConfigError
from terrella.data.packing import TrainSequence, pack
from terrella.models.config import ModelConfig
from terrella.models.gpt import build_gpt
from terrella.rl.algorithms import settings
from terrella.rl.algorithms.config import SFT
from terrella.rl.objective import make_loss
from terrella.rl.rollout.config import Vllm
from terrella.rl.rollout.embedded import EmbeddedSampler
from terrella.rl.rollout.episodes import sampled_sequence
from terrella.rl.rollout.open import open_sampler, sampling_weights
from terrella.rl.rollout.sampler import Sample, SampleRequest, SamplingParams
from terrella.tests.rl.invariant_jobs import EXPERTS


def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The model's weights, by name."""
    h, d, f = model.hidden, model.head_dim, model.expert_ffn
    found = {"embedding.word_embeddings.weight": (model.padded_vocab, h), "decoder.final_layernorm.weight": (h,)}
    found["output_layer.weight"] = (model.padded_vocab, h)
    for i in range(model.layers):
        p = f"decoder.layers.{i}."
        found |= {p + "input_layernorm.weight": (h,), p + "pre_mlp_layernorm.weight": (h,)}
        attention = p + "self_attention."
        found |= {attention + "linear_qkv.weight": ((model.heads + 2 * model.kv_heads) * d, h)}
        found |= {attention + "q_layernorm.weight": (d,), attention + "k_layernorm.weight": (d,)}
        found |= {attention + "linear_proj.weight": (h, model.heads * d), p + "mlp.router.weight": (model.experts, h)}
        for e in range(model.experts):
            expert = f"{p}mlp.experts.local_experts.{e}."
            found |= {expert + "linear_fc1.weight": (2 * f, h), expert + "linear_fc2.weight": (h, f)}
    return found


class Watch:
    """What every router of an engine did, beside what it was given."""

    def __init__(self, engine: Engine) -> None:
        self.tokens = self.wrong = 0
        layers = [layer for chunk in engine.chunks for layer in chunk.decoder.layers]  # type: ignore[union-attr]
        self.hooks = [
            layer.mlp.router.register_forward_hook(lambda _, __, out, layer=layer: self.see(layer, out[1]))
            for layer in layers
        ]

    def end(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def see(self, layer: Any, map_TE: torch.Tensor) -> None:
        given_TK = layer.replay.given_TK
        if given_TK is None:
            return
        known = given_TK[:, 0] >= 0
        wanted_TE = torch.zeros_like(map_TE).scatter_(1, given_TK.clamp_min(0).long(), True)
        self.tokens += int(known.sum())
        self.wrong += int((wanted_TE != map_TE).any(1)[known].sum())


def batches(model: ModelConfig) -> list[PackedBatch]:
    """Two batches of ragged documents, each with choices that no router makes; one sequence chooses for itself."""
    g = np.random.default_rng(3)
    rows = []
    for number, length in enumerate((9, 5, 12, 7, 11, 6)):
        ids = g.integers(0, model.vocab, length)
        draws = [g.permutation(model.experts)[: model.experts_per_token] for _ in range(length * model.layers)]
        chosen = np.array(draws, np.int16).reshape(length, model.layers, -1)
        ce = np.full(length, 1 / 40, np.float32)
        ce[0] = 0
        rows.append(TrainSequence(ids, ce=ce, experts=None if number == 1 else chosen))
    return [*pack(rows[:3]), *pack(rows[3:])]


def own_share(parallel: ParallelConfig, made: list[PackedBatch]) -> list[PackedBatch]:
    """This data rank's part of the batches."""
    data = dist.get_world_size() // parallel.model_size
    return made if data == 1 else [made[dist.get_rank()]]


def given(**layout: Any) -> dict[str, float]:
    parallel = ParallelConfig(**layout)
    engine = Engine(build_gpt(EXPERTS), parallel, OptimizerConfig(lr=0.0), PrecisionConfig(), 0)
    loss, made, watch = make_loss(settings(SFT(), 1.0)), own_share(parallel, batches(EXPERTS)), Watch(engine)
    own = engine.step([batch.without_experts() for batch in made], loss)
    done = engine.step(made, loss)
    again = 2 if parallel.recompute == "full" else 1  # every pass counts
    return {
        "loss": done.metrics["loss"],
        "own": own.metrics["loss"],
        "grad_norm": done.grad_norm,
        "given": done.metrics["routing_given"] / again,
        "disagreed": done.metrics["routing_disagreed"] / again,
        "tokens": watch.tokens / again,
        "wrong": watch.wrong,
    }


def misfit() -> str:
    engine = Engine(build_gpt(EXPERTS), ParallelConfig(), OptimizerConfig(), PrecisionConfig(), 0)
    (batch, _) = batches(replace(EXPERTS, layers=3))
    try:
        engine.step([batch], make_loss(settings(SFT(), 1.0)))
    except ConfigError as error:
        return str(error)
    return ""


def older() -> dict[str, float]:
    """A step on what weights of a step ago sampled, in bf16."""
    precision = PrecisionConfig(params="bf16")
    engine = Engine(build_gpt(EXPERTS), ParallelConfig(), OptimizerConfig(lr=1e-2), precision, 0)
    sampler = EmbeddedSampler(sampling_weights(engine), EXPERTS, notes=True)
    asked = [SampleRequest((1, 2, 3 + i), (i,), SamplingParams(12)) for i in range(8)]
    samples = [s for s in sampler.generate(asked) if isinstance(s, Sample)]
    loss, rows = make_loss(settings(SFT(), 1.0)), []
    for request, sample in zip(asked, samples, strict=True):
        sequence = sampled_sequence(request.ids, sample)
        ce = np.full(len(sequence.ids), 1 / 100, np.float32)
        ce[0] = 0
        rows.append(TrainSequence.of(sequence, ce=ce))
    made = pack(rows, budget=64)
    engine.step(made, loss)
    watch = Watch(engine)
    done = engine.step(made, loss)
    return {
        "loss": done.metrics["loss"],
        "disagreed": done.metrics["routing_disagreed"],
        "tokens": watch.tokens,
        "wrong": watch.wrong,
    }


def vllm_on_cpu() -> str:
    engine = Engine(build_gpt(EXPERTS), ParallelConfig(), None, PrecisionConfig(), 0)
    try:
        open_sampler(Vllm(), engine, EXPERTS, Path(tempfile.mkdtemp()), notes=True)
    except ConfigError as error:
        return str(error)
    return ""
