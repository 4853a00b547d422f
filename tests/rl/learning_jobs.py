"""A tiny world every algorithm must learn, run in a rank of the pool: repeat the prompt's letter in two turns.

Random answers score 1 / 8; the ceiling is 1.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from terrella.core.config import OptimizerConfig, ParallelConfig, PrecisionConfig
from terrella.core.engine import Engine
from terrella.core.mesh import Mesh
from terrella.models.config import ModelConfig
from terrella.models.gpt import build_gpt
from terrella.rl.algorithms import config as algorithms
from terrella.rl.journal import Journal, JournalSampler
from terrella.rl.loop import Trainer
from terrella.rl.loop_settings import LoopSettings
from terrella.rl.objective import logprob_score
from terrella.rl.rollout.embedded import EmbeddedSampler
from terrella.rl.rollout.open import sampling_weights
from terrella.rl.rollout.sampler import SamplingParams, Unpublished
from terrella.rl.rollout.stream import Stream

MODEL = ModelConfig(
    layers=1, hidden=32, heads=2, kv_heads=2, head_dim=16, ffn=48, vocab=8, max_positions=16, init_std=0.1
)
PROMPTS, GROUP = 8, 8


class Repeat:
    """Two turns; each turn's reward is whether the letter was repeated."""

    def __init__(self, prompt_id: int, sample_index: int) -> None:
        self.prompt_id, self.sample_index, self.letter = prompt_id, sample_index, prompt_id % 8
        self.said: list[int] = []

    def context(self):
        return None if len(self.said) == 2 else (self.letter, *self.said, self.letter)

    def receive(self, sample) -> None:
        self.said.append(sample.ids[0])

    def score(self):
        turns = [0.5 * float(s == self.letter) for s in self.said]
        return turns, sum(turns), {}


def engine_of(lr: float, value_head: str = "none", seed: int = 0) -> Engine:
    build = build_gpt(MODEL, value_head=value_head)
    return Engine(build, ParallelConfig(), OptimizerConfig(lr=lr) if lr else None, PrecisionConfig(), seed)


def embedded(engine: Engine) -> EmbeddedSampler:
    return EmbeddedSampler(sampling_weights(engine), MODEL, version=lambda: engine.steps)


def learn(
    kind: str,
    options: dict[str, Any],
    steps: int,
    lr: float = 1e-2,
    ahead: int = 0,
    sleep_s: float = 0.0,
    updates: int = 1,
    epochs: int = 1,
) -> dict[str, Any]:
    """Train and return the record; `sleep_s` makes sampling and training slow enough to see them overlap."""
    algorithm = getattr(algorithms, kind)(**options)
    engine, frozen = engine_of(lr), engine_of(0)
    critic = engine_of(lr, "scalar", seed=1) if kind in ("PPO", "StarPOS") else None
    record: list[dict[str, Any]] = []
    published: list[int] = []
    sampler: Any = embedded(engine)
    copied = Copied(engine, sleep_s) if ahead or sleep_s else None
    if copied is not None:
        sampler = Stream(copied) if ahead else copied
    fresh = iter(range(10_000_000, 20_000_000, PROMPTS))

    class Learner(Trainer):
        can_refill = kind == "DAPO"

        def episodes(self, step: int) -> list[Any]:
            return [Repeat(step * PROMPTS + i, k) for i in range(PROMPTS) for k in range(GROUP)]

        def more_episodes(self, step: int, number: int) -> list[Any]:
            first = next(fresh)
            return [Repeat(first + i, k) for i in range(PROMPTS) for k in range(GROUP)]

        def reference(self, batches: list[Any]) -> list[Any]:
            return [r["logprob"] for r in frozen.score(batches, logprob_score(1.0))]

        def record(self, step: int, values: dict[str, Any], episodes: Any, trajectories: Any) -> None:
            time.sleep(sleep_s)
            staleness = max(engine.steps - 1 - s.weight_version for t in trajectories for s in t.sequences)
            record.append({**values, "staleness": staleness})

        def publish(self, version: int) -> None:
            if copied is not None:
                with sampler.paused(60.0) if ahead else nullcontext():
                    copied.take(version)
                published.append(version)

    seen = watch(engine, updates * epochs)
    begun = time.monotonic()
    settings = LoopSettings(
        microbatch_tokens=512,
        drift_gate=1e-3,
        seed=3,
        kl_every=5,
        minibatches=updates,
        epochs=epochs,
        ahead=ahead,
        rollout_deadline_s=300.0,
    )
    Learner(engine, sampler, algorithm, SamplingParams(1), Mesh(), settings, critic).run(range(steps))
    if ahead:
        sampler.close()
    return {
        "record": record,
        "published": published,
        "seconds": time.monotonic() - begun,
        "updates": seen,
    }


def watch(engine: Engine, updates: int) -> list[dict[str, Any]]:
    """Before every update, what its tokens' log-probs are and what they were when they were sampled; after it, what
    the engine measured.
    """
    seen: list[dict[str, Any]] = []
    step = engine.step

    def watched(batches: list[Any], loss: Any) -> Any:
        now = torch.cat([r["logprob"].cpu() for r in engine.score(batches, logprob_score(1.0))])
        joined = {
            name: torch.cat([getattr(b, name) for b in batches])
            for name in ("old_logprob_T", "pg_weight_T", "advantage_T")
        }
        told = {"logprob": now, **joined} if batches[0].pg_weight_T is not None else {}
        result = step(batches, loss)
        seen.append({**told, "metrics": result.metrics})
        return result

    if updates > 1:
        engine.step = watched  # type: ignore[method-assign]
    return seen


class Copied:
    """A sampler with weights of its own, as a server has: they change only when a version is published."""

    def __init__(self, engine: Engine, sleep_s: float) -> None:
        self.engine, self.sleep_s, self.version, self.weights = engine, sleep_s, -1, {}
        self.inner = EmbeddedSampler(lambda: self.weights, MODEL, version=lambda: self.version)

    def take(self, version: int) -> None:
        self.weights = {p.name: p.param.detach().clone() for p in self.engine.local_parameters()}
        self.version = version

    def generate(self, requests):
        time.sleep(self.sleep_s)
        return self.inner.generate(requests)


class Forgetful(Copied):
    """One whose weights are lost in the so many-th call, as with a server that dies: it must be sent them again."""

    def __init__(self, engine: Engine, lost_in: int) -> None:
        super().__init__(engine, 0.0)
        self.lost_in, self.calls = lost_in, 0

    def generate(self, requests):
        self.calls += 1
        if self.calls == self.lost_in:
            self.weights = {}
        if not self.weights:
            raise Unpublished("the sampler: its weights are lost")
        return super().generate(requests)


def learn_after_a_loss(folder: str, lost_in: int, journaled: bool = True, refills: int = 0) -> dict[str, Any]:
    """Two data ranks; the second's sampler loses its weights in its so many-th call, or with 0 never. With `refills`
    groups without a signal are sampled again.
    """
    import torch.distributed as dist

    engine, record, published = engine_of(1e-2), [], []
    mesh = Mesh(dist.get_rank(), dist.get_world_size())
    copied = Forgetful(engine, lost_in if mesh.rank == 1 else 0)
    journal = Journal(Path(folder), mesh.data_rank)

    class Learner(Trainer):
        can_refill = refills > 0

        def episodes(self, step: int) -> list[Any]:
            return [Repeat(step * PROMPTS + i, k) for i in mesh.share(range(PROMPTS)) for k in range(GROUP)]

        def more_episodes(self, step: int, number: int) -> list[Any]:
            first = 1000 * (step * refills + number + 1)
            return [Repeat(first + i, k) for i in mesh.share(range(PROMPTS)) for k in range(GROUP)]

        def play(self, sampler: Any, episodes: list[Any], seed: int) -> list[Any]:
            played = super().play(sampler, episodes, seed)  # every other group of a first deal has no signal
            equal = [refills and t.prompt_id < 1000 and t.prompt_id % 2 for t in played]
            return [replace(t, reward=0.0) if same else t for t, same in zip(played, equal, strict=True)]

        def record(self, step: int, values: dict[str, Any], episodes: Any, trajectories: Any) -> None:
            record.append({name: value for name, value in values.items() if not name.startswith("time/")})
            record[-1]["refilled"] = len(self.refilled)

        def publish(self, version: int) -> None:
            copied.take(version)
            published.append(version)

    settings = LoopSettings(microbatch_tokens=512, drift_gate=1e-3, seed=3)
    sampler = JournalSampler(copied, journal, lambda: engine.steps) if journaled else copied
    algorithm = algorithms.DAPO(refills=refills) if refills else algorithms.GRPO()
    Learner(engine, sampler, algorithm, SamplingParams(1), mesh, settings).run(range(3))
    return {"record": record, "published": published, "reused": getattr(sampler, "reused", 0)}
