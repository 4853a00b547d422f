"""Demonstrations of the scripted oracles as shards of steps, and the list of their tasks."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...core.files import make_folder
from ...core.process import usable_cores
from ...core.progress import Progress
from ...data.shards.writer import ordered_map
from ...rl.webrl.astray import stray
from ...rl.webrl.episode import WebEpisode, demonstrate
from ...rl.webrl.prompts import Prompter
from ...rl.webrl.steps import WebTrajectory, converted, write_trajectories
from ...rl.worlds.web.generate import CONTENT, SiteTask
from ...rl.worlds.web.world import WebWorld
from ..job import Job
from ..settings.web import WebDemos, WebStart
from .web import STEPS, TASKS, make_world, pool_of, prompter_of, seeded, start_of, uses_browser, write_tasks

PART = 250  # tasks that a process plays at a time
WORTH = 2000  # demonstrations that repay the start of a process


def check(stage: WebDemos, job: Job) -> None:
    """Shards that are named are there."""
    if stage.shards and not Path(stage.shards).exists():
        raise ConfigError(
            f"stages: {stage.name}.shards = {stage.shards}: no such folder; terrella shards make webrl (or sharegpt) makes it"
        )


def run(stage: WebDemos, job: Job) -> dict[str, Any]:
    """Play and write. One rank does it: an oracle costs no model."""
    folder = make_folder(job.stage_folder(stage.name))
    told: dict[str, Any] = {}
    if job.mesh.is_main:
        pool = pool_of(start_of(job))
        tasks = seeded(job, stage.name).sample(pool, min(stage.count, len(pool)))
        kept, cut = (converted(Path(stage.shards), prompter_of(job)), 0) if stage.shards else _played(stage, job, tasks)
        job.run.guard()
        shutil.rmtree(folder / STEPS, ignore_errors=True)
        steps = write_trajectories(folder / STEPS, kept)
        write_tasks(folder / TASKS, tasks)
        told = {"trajectories": len(kept), "steps": steps, "successes": sum(t.success for t in kept), "pages_cut": cut, "pool": len(pool)}
    return job.mesh.from_main(lambda: told)


def _played(stage: WebDemos, job: Job, tasks: list[SiteTask]) -> tuple[list[WebTrajectory], int]:
    """The oracle's trajectories, and in how many a page was cut. Many play on all cores at once: the same ones, in the same order."""
    oracle = Oracle(stage, start_of(job), prompter_of(job), job.recipe.seed)
    workers = min(usable_cores(), len(tasks) * stage.samples // WORTH)
    if workers < 2 or uses_browser(oracle.start):
        workers = 0
    played: list[tuple[WebTrajectory, bool]] = []
    progress = Progress(stage.name, len(tasks) * stage.samples)
    for found in ordered_map(oracle.play, enumerate(tasks), workers, PART):
        played += found
        progress.update(len(played))
    return [t for t, _ in played], sum(cut for _, cut in played)


@dataclass
class Oracle:
    """Plays tasks; a copy of it plays in another process."""

    stage: WebDemos
    start: WebStart
    prompter: Prompter
    seed: int

    @cached_property
    def world(self) -> WebWorld:
        return make_world(self.start)

    @cached_property
    def alike(self) -> dict[tuple[int, int], list[SiteTask]]:
        """The pool by kind of task."""
        found: dict[tuple[int, int], list[SiteTask]] = {}
        for task in pool_of(self.start):
            found.setdefault(_kind(task), []).append(task)
        return found

    def play(self, numbered: tuple[int, SiteTask]) -> list[tuple[WebTrajectory, bool]]:
        """All samples of a task, and whether a page of theirs was cut."""
        (number, task), found = numbered, []
        for sample in range(self.stage.samples):
            rng = random.Random(f"{self.seed} {self.stage.name} {number}" + (f" {sample}" if sample else ""))
            episode = WebEpisode(self.world, task, number, sample, self.prompter)
            if self.stage.astray and rng.random() < self.stage.astray:
                stray(episode, rng.choice(self.alike[_kind(task)]).steps, rng)
            else:
                demonstrate(episode, self.stage.noise, rng)
            if episode.fault is not None:
                raise RuntimeError(f"task {task.task.task_id}: {episode.fault.reason}")
            found.append((episode.trajectory(f"{number:06d}-{sample}"), episode.cut > 0))
        return found


def _kind(task: SiteTask) -> tuple[int, int]:
    """Template and content: tasks that differ in what they name alone."""
    return task.task.template_id, int(task.task.raw.get(CONTENT, 0))
