"""RL on an environment's training tasks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...core.errors import ConfigError
from ...rl.preparation import wants_refills
from ...rl.rollout.config import Embedded
from ...rl.rollout.open import as_stream, open_sampler
from ...rl.tasks import Tasks
from ..job import Job
from ..settings.verbs import Reinforce
from .common import build_engine
from .on_policy import StageTrainer
from .verbs import environment, require_judged, require_sampler, require_tasks


def check(stage: Reinforce, job: Job) -> None:
    """Before the run starts: the environment opens, has training tasks, and can judge them."""
    require_sampler(stage, job)
    try:
        wants_refills(stage.algorithm, stage.actions is None, stage.rollouts.ahead)
    except ConfigError as error:
        raise ConfigError(f"stages: {stage.name}.rollouts.{error}") from error
    if job.mesh.is_main:
        with environment(stage, job) as tasks:
            require_judged(tasks, "train")
            require_tasks(tasks, "train", stage.name)
            tasks.require_room(stage.max_new_tokens, "train" if stage.validation is None else None)
            if stage.validation is None:
                return
            require_tasks(tasks, "test", stage.name)
            if tasks.imagined_by is None and stage.validation.on_gap == "stop":
                raise ConfigError(
                    f"stages: {stage.name}.validation.on_gap: only RL in an imagined world has a gap to stop at; give "
                    "its env imagined_by, or leave on_gap out"
                )


def run(stage: Reinforce, job: Job) -> dict[str, Any]:
    """Train to the last step and say how many gradient tokens it took."""
    with environment(stage, job) as tasks:
        for split in ("train", "test") if stage.validation is not None else ("train",):
            require_tasks(tasks, split, stage.name)  # what an earlier stage was to make is there now
        job.mesh.from_main(lambda: tasks.reset("train"))
        with _imagination(stage, job, tasks):
            outcome = {**tasks.facts(), **StageTrainer(stage, job, tasks).train()}
        if job.mesh.is_main:
            rows = [row for row in job.run.metrics.rows() if row["stage"] == stage.name]
            for name, table in tasks.step_tables(stage.name, rows).items():
                job.run.write_result(f"{stage.name}-{name}", table)
    return outcome


@contextmanager
def _imagination(stage: Reinforce, job: Job, tasks: Tasks) -> Iterator[None]:
    """The world model that plays the world of the training tasks, where the environment names one."""
    if tasks.imagined_by is None:
        yield
        return
    engine = build_engine(job, None, tasks.imagined_by)
    folder = job.stage_folder(stage.name) / "imagination"
    opened = open_sampler(Embedded(), engine, job.model, folder, mesh=job.mesh)
    if stage.rollouts.streamed:
        opened = as_stream(opened)
    try:
        if opened.publish is not None:
            opened.publish(engine.steps)
        tasks.imagination = opened.sampler
        yield
    finally:
        opened.close()
