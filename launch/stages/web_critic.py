"""The critic's epoch: twin heads on states and next states, the trajectory's outcome as the label."""

from __future__ import annotations

from typing import Any

from ...core.config import OptimizerConfig
from ...core.engine import Engine
from ...data.packing import TrainSequence
from ...rl.webrl.critic import state_row, twin_loss
from ..job import Job
from ..settings.web import WebCritic
from .common import build_engine, load_final
from .web import fit_items, prompter_of
from .web_replay import experience_of


def build_twin(job: Job, optimizer: OptimizerConfig | None, init: str, resume: str | None = None) -> Engine:
    """A critic: an earlier one's weights, or a policy's with fresh heads."""
    if resume is None:
        return build_engine(job, optimizer, init, value_head="twin")
    engine = build_engine(job, optimizer, value_head="twin", loaded=True)
    load_final(job, engine, resume, plain=True)
    return engine


def run(stage: WebCritic, job: Job) -> dict[str, Any]:
    """Train on every step of the phase's experience."""
    experience = experience_of(job, stage.data)
    end = prompter_of(job).stop_id
    engine = build_twin(job, stage.training.optimizer, stage.init, stage.resume)

    def rows(share: list[int], whole: list[int]) -> list[TrainSequence]:
        found = []
        for place in (experience.steps[i] for i in share):
            label = experience.trajectories[place[0]].reward
            step = experience.step(place)
            found += [state_row(prompt, end, label, 1.0 / len(whole)) for prompt in (step.prompt, step.following)]
        return found

    def describe(sums: dict[str, float]) -> dict[str, float]:
        return {
            "loss": sums["loss"],
            "accuracy": sums["right"] / sums["states"],
            "positive": sums["positive"] / sums["states"],
        }

    return fit_items(job, stage.name, engine, stage.training, len(experience.steps), rows, twin_loss, describe)
