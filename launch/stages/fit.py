"""The training loop of stages with a fixed dataset: lessons, judged episodes, states."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ...core.batch import PackedBatch
from ...core.engine import Engine, LossFn
from ...core.progress import Progress
from ...rl.step_record import require_finite
from ..job import Job
from ..settings.verbs import Tune
from ..settings.web import Training
from .common import Checkpoints

Portion = tuple[list[PackedBatch], dict[str, int]]  # what one step learns from, and its counts


def fit(
    job: Job,
    name: str,
    engine: Engine,
    pace: Tune | Training,
    steps: int,
    portion_of: Callable[[int], Portion],
    loss: LossFn,
    describe: Callable[[dict[str, float]], dict[str, float]],
) -> dict[str, Any]:
    """Train to the last step from the stage's newest checkpoint: take a step's portion, train, watch, log, save. Counts
    of the portions are added up over the steps.
    """
    checkpoints = Checkpoints(job, name, pace.checkpoint_every, steps, pace.checkpoints)
    start, kept = checkpoints.resume(engine)
    # besides the counts, a checkpoint keeps its stage and a digest, which are not numbers
    totals = {key: value for key, value in kept.items() if isinstance(value, int)}
    progress = Progress(name, steps, start=start, speak=job.mesh.is_main)
    for step in range(start, steps):
        started_at = time.monotonic()
        batches, counts = portion_of(step)
        result = engine.step(batches, loss)
        totals = {key: totals.get(key, 0) + count for key, count in counts.items()}
        values = {**describe(result.metrics), "grad_norm": result.grad_norm, "lr": result.lr, **totals}
        if "balance_loss" in result.metrics:
            values["balance_loss"] = result.metrics["balance_loss"]
        require_finite(values, step + 1)
        took = time.monotonic() - started_at
        if job.mesh.is_main and ((step + 1) % pace.log_every == 0 or step + 1 == steps):
            speed = {f"time/{key}_per_s": count / took for key, count in counts.items()}
            job.run.metrics.append(name, step + 1, {**values, "time/step_s": took, **speed})
        progress.update(step + 1, f"loss {values['loss']:.4f}")
        checkpoints.save(engine, step + 1, totals)
    return {"steps": steps, **totals, **checkpoints.outcome()}
