"""Demonstrations of the scripted oracles as shards of steps, and the list of their tasks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ...core.files import make_folder
from ...core.progress import Progress
from ...rl.webrl.astray import stray
from ...rl.webrl.episode import demonstrate
from ...rl.webrl.steps import WebTrajectory, converted, write_trajectories
from ...rl.worlds.web.generate import CONTENT, SiteTask
from ..job import Job
from ..settings.web import WebDemos
from .web import STEPS, TASKS, Players, pool_of, prompter_of, seeded, start_of, write_tasks


def run(stage: WebDemos, job: Job) -> dict[str, Any]:
    """Play and write. One rank does it: an oracle costs no model."""
    folder = make_folder(job.stage_folder(stage.name))
    told: dict[str, Any] = {}
    if job.speaks:
        pool = pool_of(start_of(job))
        tasks = seeded(job, stage.name).sample(pool, min(stage.count, len(pool)))
        kept, cut = (_given(stage.shards, job), 0) if stage.shards else _played(stage, job, tasks)
        job.run.guard()
        shutil.rmtree(folder / STEPS, ignore_errors=True)
        steps = write_trajectories(folder / STEPS, kept)
        write_tasks(folder / TASKS, tasks)
        told = {"trajectories": len(kept), "steps": steps, "successes": sum(t.success for t in kept), "pages_cut": cut, "pool": len(pool)}
    return job.gather(told)[0]


def _played(stage: WebDemos, job: Job, tasks: list[SiteTask]) -> tuple[list[WebTrajectory], int]:
    """The oracle's trajectories, and in how many a page was cut."""
    players, kept, cut = Players(job), [], 0
    alike: dict[tuple[int, int], list[SiteTask]] = {}
    for task in pool_of(players.start) if stage.astray else ():
        alike.setdefault(_kind(task), []).append(task)
    progress = Progress(stage.name, len(tasks) * stage.samples)
    for number, task in enumerate(tasks):
        for sample in range(stage.samples):
            rng = seeded(job, f"{stage.name} {number}" + (f" {sample}" if sample else ""))
            episode = players.episode(0, task, number, sample)
            if stage.astray and rng.random() < stage.astray:
                stray(episode, rng.choice(alike[_kind(task)]).steps, rng)
            else:
                demonstrate(episode, stage.noise, rng)
            if episode.fault is not None:
                raise RuntimeError(f"task {task.task.task_id}: {episode.fault.reason}")
            kept.append(episode.trajectory(f"{number:06d}-{sample}"))
            cut += episode.cut > 0
            progress.update(len(kept))
    return kept, cut


def _kind(task: SiteTask) -> tuple[int, int]:
    """Template and content: tasks that differ in what they name alone."""
    return task.task.template_id, int(task.task.raw.get(CONTENT, 0))


def _given(shards: str, job: Job) -> list[WebTrajectory]:
    """Converted trajectories, encoded."""
    prompter = prompter_of(job)
    begin = () if prompter.tokenizer.bos_id is None else (prompter.tokenizer.bos_id,)
    return converted(Path(shards), prompter.tokenizer.encode, begin, prompter.stop_id, prompter.limit)
