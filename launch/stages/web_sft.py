"""Imitation of demonstrations."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...core.errors import ConfigError
from ...data.packing import TrainSequence
from ...kernels.policy import PolicySettings
from ...rl.objective import make_loss
from ..job import Job
from ..settings.web import WebSupervised
from .common import build_engine
from .web import fit, read_steps


def run(stage: WebSupervised, job: Job) -> dict[str, Any]:
    """Cross-entropy over the actions of successful trajectories; the loss is a mean over a step's tokens."""
    steps = [s for t in read_steps(job, stage.data) if t.success for s in t.steps if s.learn]
    if not steps:
        raise ConfigError(f"stages: {stage.name}.data: '{stage.data}' left no successful step to imitate; name a stage with demonstrations")
    engine = build_engine(job, stage.training.optimizer, stage.init)

    def rows(mine: list[int], whole: list[int]) -> list[TrainSequence]:
        total = np.float32(sum(len(steps[i].action) for i in whole))
        return [TrainSequence(steps[i].ids, ce=steps[i].mask / total) for i in mine]

    loss = make_loss(PolicySettings())
    return fit(job, stage.name, engine, stage.training, len(steps), rows, loss, lambda sums: {"loss": sums["loss"]})
