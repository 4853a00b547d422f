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
from .web import fit, prompter_of, read_steps


def run(stage: WebSupervised, job: Job) -> dict[str, Any]:
    """Cross-entropy over the actions of successful trajectories, and over what was read where the stage asks for it; each is a mean over
    its tokens of the step."""
    steps = [s for t in read_steps(job, stage.data) if t.success for s in t.steps if s.learn]
    if not steps:
        raise ConfigError(f"stages: {stage.name}.data: '{stage.data}' left no successful step to imitate; name a stage with demonstrations")
    engine = build_engine(job, stage.training.optimizer, stage.init)
    pad = prompter_of(job).tokenizer.pad_id

    def rows(mine: list[int], whole: list[int]) -> list[TrainSequence]:
        acted = np.float32(sum(len(steps[i].action) for i in whole))
        if not stage.prompts:
            return [TrainSequence(steps[i].ids, ce=steps[i].mask / acted) for i in mine]
        seen = np.float32(sum(steps[i].read(pad).sum() for i in whole) / stage.prompts)
        return [TrainSequence(steps[i].ids, ce=steps[i].mask / acted + steps[i].read(pad) / seen) for i in mine]

    loss = make_loss(PolicySettings())
    return fit(job, stage.name, engine, stage.training, len(steps), rows, loss, lambda sums: {"loss": sums["loss"]})
