"""The loop that stages of cross-entropy share: take a portion, step, watch, log, save."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...core.batch import PackedBatch
from ...core.engine import Engine
from ...core.progress import Progress
from ...kernels.policy import PolicySettings
from ...rl.objective import make_loss
from ...rl.values import require_finite
from ..job import Job
from .common import Checkpoints


@dataclass(frozen=True)
class Portion:
    """What one step learns from: this rank's microbatches, the gradient tokens of all ranks, and where the data stands after it."""

    batches: list[PackedBatch]
    tokens: int
    state: dict[str, Any] = field(default_factory=dict)


class Cadence(Protocol):
    """A stage's settings, as far as the loop reads them."""

    @property
    def name(self) -> str: ...
    @property
    def checkpoint_every(self) -> int: ...
    @property
    def log_every(self) -> int: ...


Portions = Callable[[int], Portion]  # of a step


def fit(stage: Cadence, job: Job, engine: Engine, steps: int, begin: Callable[[dict[str, Any]], Portions]) -> dict[str, Any]:
    """Train to the last step, going on from the stage's newest checkpoint; `begin` gets the state kept there and gives the portions."""
    checkpoints = Checkpoints(job, stage.name, stage.checkpoint_every, steps)
    start, kept = checkpoints.resume(engine)
    portion_of = begin(kept)
    tokens = kept.get("tokens", 0)
    loss = make_loss(PolicySettings())
    progress = Progress(stage.name, steps, start=start, speak=job.mesh.is_main)
    for step in range(start, steps):
        begun = time.monotonic()
        portion = portion_of(step)
        result = engine.step(portion.batches, loss)
        tokens += portion.tokens
        values = {
            "loss": result.metrics["loss"],
            "entropy": result.metrics["entropy"] / max(1.0, result.metrics["tokens"]),
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": tokens,
        }
        require_finite(values, step)
        took = time.monotonic() - begun
        if job.mesh.is_main and ((step + 1) % stage.log_every == 0 or step + 1 == steps):
            job.run.metrics.append(stage.name, step + 1, {**values, "time/step_s": took, "time/tokens_per_s": portion.tokens / took})
        progress.update(step + 1, f"loss {values['loss']:.4f}")
        checkpoints.save(engine, step + 1, {"tokens": tokens, **portion.state})
    return {"steps": steps, "tokens": tokens, "checkpoint": checkpoints.final()}


def steps_for(tokens: int, each: int) -> int:
    """Steps of `each` gradient tokens that give at least so many."""
    return max(1, -(-tokens // each))
