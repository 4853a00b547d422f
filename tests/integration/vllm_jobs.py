"""The trainer's side of the vLLM tests, run in a rank of the pool: the real engine on CPU, beside a real vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from terrella.core.config import OptimizerConfig, ParallelConfig, PrecisionConfig
from terrella.core.engine import Engine
from terrella.core.mesh import Mesh
from terrella.data.packing import TrainSequence, pack, unpack
from terrella.models.config import ModelConfig
from terrella.models.gpt import build_gpt
from terrella.models.hf import hf_tensors, write_folder
from terrella.rl.objective import logprob_score, make_loss
from terrella.rl.rollout.server_auth import KEY_VARIABLE
from terrella.rl.sync.names import engine_weights
from terrella.rl.sync.publish import publish
from terrella.rl.sync.transports import BroadcastTransport, DiskTransport

COMMON = {"layers": 2, "hidden": 64, "heads": 2, "head_dim": 32, "ffn": 96, "max_positions": 128, "init_std": 0.1}
MODELS = {
    "llama": ModelConfig(family="llama", kv_heads=1, vocab=8, **COMMON),
    "qwen2": ModelConfig(family="qwen2", kv_heads=2, vocab=61, qkv_bias=True, tied=True, **COMMON),
}


def trained(name: str, steps: int, tensor: int = 1) -> Engine:
    """The same engine every time: seeded weights, then `steps` optimizer steps on fixed tokens."""
    from terrella.kernels.policy import PolicySettings

    engine = Engine(
        build_gpt(MODELS[name]), ParallelConfig(tensor=tensor), OptimizerConfig(lr=3e-2), PrecisionConfig(), 0
    )
    ids = torch.randint(0, MODELS[name].vocab, (4, 12), generator=torch.Generator().manual_seed(5)).numpy()
    weight = torch.full((12,), 1 / 44).numpy()
    weight[0] = 0
    for _ in range(steps):
        engine.step(pack([TrainSequence(row, ce=weight) for row in ids]), make_loss(PolicySettings()))
    return engine


def write_models(folders: dict[str, str]) -> None:
    """The untrained models as Hugging Face folders."""
    for name, folder in folders.items():
        engine = trained(name, 0)
        write_folder(
            Path(folder), MODELS[name], hf_tensors(MODELS[name], engine.parameters(), "fp32"), "fp32", None, 1 << 30
        )


def score(name: str, steps: int, rows: list[tuple[int, ...]], temperature: float = 1.0) -> list[list[float]]:
    """The trainer's log-prob of every id of every row, after so many steps; entry 0 is 0."""
    import numpy as np

    batches = pack([TrainSequence(np.array(ids)) for ids in rows])
    scored = trained(name, steps).score(batches, logprob_score(temperature))
    return [array.tolist() for array in unpack(batches, [s["logprob"] for s in scored]).values()]


def send(name: str, steps: int, url: str, folder: str | None, key: str) -> dict[str, Any]:
    """Train and publish to a server: through a folder, or by broadcast from this process."""
    from terrella.rl.rollout.vllm_client import Remote

    os.environ[KEY_VARIABLE] = key
    engine = trained(name, steps)
    transport = DiskTransport(Path(folder)) if folder else BroadcastTransport()
    report = publish(transport, [Remote(url)], lambda: engine_weights(engine), steps, timeout_s=300)
    return {"seconds": report.seconds, "tensors": report.tensors}


def learn_letters(
    settings: Any, url: str | None, steps: int, episodes: int, seed: int, key: str = ""
) -> dict[str, Any]:
    """GRPO on the letter world, sampled by a vLLM server or by the embedded sampler; then the success of fresh
    episodes.

    The reward is sparse: with either sampler about one seed in six leaves one of the eight letters unlearnt.
    """
    from terrella.rl.algorithms.config import GRPO
    from terrella.rl.loop import Trainer
    from terrella.rl.loop_settings import LoopSettings
    from terrella.rl.rollout.embedded import EmbeddedSampler
    from terrella.rl.rollout.episodes import rollout
    from terrella.rl.rollout.open import sampling_weights
    from terrella.rl.rollout.sampler import SamplingParams
    from terrella.rl.rollout.vllm_client import Remote, ServedVllm
    from terrella.tests.rl.learning_jobs import Repeat

    config = MODELS["llama"]
    engine = Engine(build_gpt(config), ParallelConfig(), OptimizerConfig(lr=4e-3), PrecisionConfig(), 0)
    sampler: Any = EmbeddedSampler(sampling_weights(engine), config, version=lambda: engine.steps)
    transport: Any = None
    if url is not None:
        os.environ[KEY_VARIABLE] = key
        sampler, transport = ServedVllm(settings, [Remote(url)]), BroadcastTransport()
    record: list[dict[str, Any]] = []

    class Learner(Trainer):
        def episodes(self, step: int) -> list[Any]:
            return [Repeat(step * 8 + i, k) for i in range(8) for k in range(16)]

        def reference(self, batches: list[Any]) -> list[Any]:
            return [r["logprob"] for r in engine.score(batches, logprob_score(1.0))]

        def publish(self, version: int) -> None:
            if transport is not None:
                publish(transport, sampler.targets, lambda: engine_weights(engine), version, timeout_s=300)

        def record(self, step: int, values: dict[str, Any], episodes: Any, trajectories: Any) -> None:
            record.append(values)

    loop = LoopSettings(microbatch_tokens=512, drift_gate=1e-4, seed=seed)
    Learner(engine, sampler, GRPO(entropy_coef=0.05), SamplingParams(1), Mesh(), loop).run(range(steps))
    final = rollout(sampler, [Repeat(10**6 + i, 0) for i in range(episodes)], SamplingParams(1), seed=11)
    return {
        "success": sum(t.reward == 1.0 for t in final) / episodes,
        "first": record[0]["reward/mean"],
        "drift": max(r.get("logprob_drift/mean", 0.0) for r in record),
    }


def killed(folder: str, environment: dict[str, str]) -> dict[str, Any]:
    """A sampler opened from settings, as a stage does: trained weights published by disk, its server killed in the
    middle of a batch.
    """
    import os
    import signal

    from terrella.rl.rollout.config import Vllm
    from terrella.rl.rollout.open import open_sampler
    from terrella.rl.rollout.sampler import SampleRequest, SamplingParams

    os.environ |= environment
    engine = trained("llama", 2)
    settings = Vllm(transport="disk", eager=True, max_length=96, max_sequences=32, request_s=300)
    opened = open_sampler(settings, engine, MODELS["llama"], Path(folder))
    sampler: Any = opened.sampler
    try:
        assert opened.publish is not None
        opened.publish(engine.steps)
        asked = [
            SampleRequest(tuple((5 * i + j) % 8 for j in range(4)), (1, i, 0, 0), SamplingParams(64))
            for i in range(160)
        ]
        calm = sampler.generate(asked)
        target = sampler.targets[0]
        post, answered = target.post, []

        def post_and_kill(path: str, *rest: Any, **options: Any) -> Any:
            answer = post(path, *rest, **options)
            if path == "/v1/completions" and not answered:  # the first of five times 32 that are asked at once
                answered.append(path)
                os.killpg(target.server.process.pid, signal.SIGKILL)
            return answer

        target.post = post_and_kill
        again = sampler.generate(asked)
        rows = [r.ids + s.ids for r, s in zip(asked, again, strict=True)]
        scored = score("llama", 2, rows)
        gap = max(
            abs(p - q) for s, row in zip(again, scored, strict=True) for p, q in zip(s.logprobs, row[4:], strict=True)
        )
        return {
            "same": again == calm,
            "restarts": sampler.restarts,
            "reissued": sampler.reissued,
            "gap": gap,
            "versions": sorted({s.weight_version for s in again}),
        }
    finally:
        opened.close()


def killed_in_sync(folder: str, environment: dict[str, str]) -> dict[str, Any]:
    """Two tensor-parallel ranks send their parts to two servers, of which one is killed when it should receive."""
    import os
    import signal

    import torch.distributed as dist

    from terrella.rl.rollout.config import Vllm
    from terrella.rl.rollout.open import open_sampler
    from terrella.rl.rollout.sampler import SampleRequest, SamplingParams

    os.environ |= environment
    engine = trained("qwen2", 2, tensor=2)
    settings = Vllm(devices=["", ""], eager=True, max_length=96, max_sequences=1, sync_s=120)
    mesh = Mesh(dist.get_rank(), 2, ParallelConfig(tensor=2))
    opened = open_sampler(settings, engine, MODELS["qwen2"], Path(folder), mesh=mesh)
    sampler: Any = opened.sampler
    asked = [SampleRequest((i, 7, 2 * i, 3), (1, i, 0, 0), SamplingParams(16)) for i in range(8)]
    try:
        assert opened.publish is not None and opened.last is None
        opened.publish(engine.steps)
        calm = mesh.from_main(lambda: sampler.generate(asked))
        target = sampler.targets[1]
        call, killed = target.call, []

        def kill_and_call(method: str, *rest: Any, **options: Any) -> Any:
            if method == "terrella_receive_parts" and not killed:
                killed.append(method)
                os.killpg(target.server.process.pid, signal.SIGKILL)
            return call(method, *rest, **options)

        target.call = kill_and_call
        opened.publish(engine.steps)
        again = mesh.from_main(lambda: sampler.generate(asked))
        states = [t.call("terrella_state", timeout_s=60.0)[0]["version"] for t in sampler.targets]
        return {
            "same": again == calm,
            "restarts": sampler.restarts,
            "attempts": opened.last.attempts if opened.last else 0,
            "versions": states,
        }
    finally:
        opened.close()


def killed_for_others(folder: str, environment: dict[str, str]) -> dict[str, Any]:
    """Two data ranks; the server is killed when the first, which owns it, has all of its samples and the second has
    not asked yet.
    """
    import os
    import signal
    import time

    import torch.distributed as dist

    from terrella.rl.rollout.config import Vllm
    from terrella.rl.rollout.open import open_sampler
    from terrella.rl.rollout.resample import make_with_republish
    from terrella.rl.rollout.sampler import SampleRequest, SamplingParams

    os.environ |= environment
    mesh, engine = Mesh(dist.get_rank(), 2), trained("llama", 2)
    settings = Vllm(eager=True, max_length=96, max_sequences=1, start_s=1200)
    opened = open_sampler(settings, engine, MODELS["llama"], Path(folder), mesh=mesh)
    sampler: Any = opened.sampler
    asked = [SampleRequest((mesh.rank, i, 3), (1, mesh.rank, i, 0), SamplingParams(8)) for i in range(4)]
    dead, sent = Path(folder) / "dead", 0

    def publish() -> None:
        nonlocal sent
        assert opened.publish is not None
        opened.publish(engine.steps)
        sent += 1

    def make() -> Any:
        end = time.monotonic() + 300
        while not mesh.is_main and not dead.exists() and time.monotonic() < end:
            time.sleep(0.1)
        samples = sampler.generate(asked)
        if mesh.is_main:
            os.killpg(sampler.targets[0].server.process.pid, signal.SIGKILL)
            dead.touch()
        return samples

    try:
        publish()
        calm = sampler.generate(asked)
        mesh.barrier()
        begun = time.monotonic()
        made = make_with_republish(mesh, sampler, make, publish, "a step")
        return {"same": made == calm, "sent": sent, "seconds": time.monotonic() - begun}
    finally:
        opened.close()
