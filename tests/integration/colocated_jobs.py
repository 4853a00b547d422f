"""The trainer's side of the tests with a colocated vLLM: everything in one rank of the pool, vLLM as a child of it."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import torch

from terrella.core.config import OptimizerConfig, ParallelConfig, PrecisionConfig
from terrella.core.engine import Engine
from terrella.core.mesh import Mesh
from terrella.data.packing import TrainSequence, pack, unpack
from terrella.models.gpt import build_gpt
from terrella.models.lora import LoraConfig
from terrella.rl.objective import logprob_score, make_loss
from terrella.rl.rollout.sampler import SampleRequest, SamplingParams
from terrella.tests.integration.vllm_jobs import MODELS, trained


def prepare(environment: dict[str, str]) -> None:
    """The pool's ranks are daemons, which may have no children; a run's workers are not."""
    os.environ |= environment
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def questions(n: int, tokens: int) -> list[SampleRequest]:
    return [
        SampleRequest(tuple((5 * i + j) % 8 for j in range(4)), (1, i, 0, 0), SamplingParams(tokens)) for i in range(n)
    ]


def gap(engine: Engine, asked: list[SampleRequest], samples: list[Any]) -> float:
    """Between the sampler's log-probs and the engine's."""
    import numpy as np

    batches = pack([TrainSequence(np.array(r.ids + s.ids)) for r, s in zip(asked, samples, strict=True)])
    scored = unpack(batches, [s["logprob"] for s in engine.score(batches, logprob_score(1.0))])
    rows = zip(asked, samples, scored.values(), strict=True)
    return max(abs(p - float(q)) for r, s, row in rows for p, q in zip(s.logprobs, row[len(r.ids) :], strict=True))


def another_step(engine: Engine) -> None:
    from terrella.kernels.policy import PolicySettings

    ids = torch.randint(0, 8, (4, 12), generator=torch.Generator().manual_seed(6)).numpy()
    weight = torch.full((12,), 1 / 44).numpy()
    weight[0] = 0
    engine.step(pack([TrainSequence(row, ce=weight) for row in ids]), make_loss(PolicySettings()))


def colocated(folder: str, environment: dict[str, str]) -> dict[str, Any]:
    """A colocated sampler opened as a stage does: two versions through shared memory, then its process killed in the
    middle.
    """
    from terrella.rl.rollout.config import Vllm
    from terrella.rl.rollout.open import open_sampler

    prepare(environment)
    engine = trained("llama", 1)
    settings = Vllm(colocated=True, eager=True, max_length=96, max_sequences=32, request_s=300)
    opened = open_sampler(settings, engine, MODELS["llama"], Path(folder))
    sampler: Any = opened.sampler
    try:
        assert opened.publish is not None
        asked, gaps, versions = questions(24, 64), [], []
        for _ in range(2):
            opened.publish(engine.steps)
            samples = sampler.generate(asked)
            gaps.append(gap(engine, asked, samples))
            versions.append(sorted({s.weight_version for s in samples}))
            another_step(engine)
        opened.publish(engine.steps)
        asked = questions(160, 64)  # five times as many as are decoded at once
        calm = sampler.generate(asked)
        llm_engine = sampler.llm.llm_engine
        step, steps = llm_engine.step, []

        def step_and_kill() -> Any:
            steps.append(step())
            if len(steps) == 3:
                sampler.children[0].kill()
            return steps[-1]

        llm_engine.step = step_and_kill
        again = sampler.generate(asked)
        return {
            "gaps": gaps,
            "versions": versions,
            "same": again == calm,
            "restarts": sampler.restarts,
            "gap": gap(engine, asked, again),
        }
    finally:
        opened.close()


def adapters(folder: str, environment: dict[str, str], colocated: bool) -> dict[str, Any]:
    """A LoRA model: vLLM starts on the frozen weights and gets adapters alone; all data ranks ask it."""
    import torch.distributed as dist

    from terrella.rl.rollout.config import Vllm
    from terrella.rl.rollout.open import open_sampler

    prepare(environment)
    lora = LoraConfig(rank=8, alpha=16.0)
    engine = Engine(
        build_gpt(MODELS["llama"], lora=lora), ParallelConfig(), OptimizerConfig(lr=5e-2), PrecisionConfig(), 0
    )
    settings = Vllm(colocated=colocated, adapters_only=True, eager=True, max_length=96, max_sequences=32, request_s=300)
    mesh = Mesh(dist.get_rank(), dist.get_world_size())
    opened = open_sampler(settings, engine, MODELS["llama"], Path(folder), mesh=mesh)
    try:
        assert opened.publish is not None
        asked, gaps, sampled, bytes_sent = questions(8, 16), [], [], []
        for _ in range(3):
            opened.publish(engine.steps)
            samples: Any = opened.sampler.generate(asked)
            gaps.append(gap(engine, asked, samples))
            sampled.append([s.logprobs for s in samples])
            files = sorted(Path(folder).glob("adapters*/adapter-*/adapter_model.safetensors"))
            bytes_sent.append(files[-1].stat().st_size)
            another_step(engine)
        return {
            "gaps": gaps,
            "changed": sampled[0] != sampled[1] != sampled[2],
            "versions": samples[0].weight_version,
            "bytes": bytes_sent,
        }
    finally:
        opened.close()
