"""Held-out tasks: every model beside trivial policies and the demonstrations, with intervals."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...core.files import write_json
from ...core.progress import Progress
from ...core.rng import fold
from ...data.trajectory import Invalid, Trajectory
from ...rl.rollout.sampler import Sampler
from ...rl.statistics import Estimate, mean
from ...rl.tasks import Tasks
from ..job import Job
from ..settings.verbs import Score
from .common import build_engine, sampler_of, sampling
from .on_policy import picture
from .verbs import environment, require_judged, require_tasks

Rewards = list[float | None]  # of each task, the mean over its samples; None where all of them were Invalid
TRUTH = "demonstrations"


def check(stage: Score, job: Job) -> None:
    """Before the run starts: the environment opens and has tasks to evaluate on."""
    if job.mesh.is_main:
        with environment(stage, job) as tasks:
            require_judged(tasks)
            require_tasks(tasks, "test", stage.name)


def run(stage: Score, job: Job) -> dict[str, Any]:
    """Play, score, write the table and the summary in words. Every data rank plays its share."""
    with environment(stage, job) as tasks:
        test = tasks.of("test")
        chosen = [test[int(i)] for i in np.linspace(0, len(test) - 1, min(stage.n, len(test))).round()]
        rewards: dict[tuple[str, float], Rewards] = {}
        progress = Progress(stage.name, len(stage.models) * len(stage.temperatures), speak=job.mesh.is_main)
        for name in stage.models:
            with sampling(job, stage.name, build_engine(job, None, name), sampler_of(stage, job)) as sampler:
                for temperature in stage.temperatures:
                    rewards[name, temperature] = _play(stage, job, tasks, sampler, chosen, name, temperature)
                    progress.update(len(rewards))
        beside = job.mesh.from_main(lambda: _baselines(tasks, chosen))
    if job.mesh.is_main:
        job.run.write_result(stage.name, table(stage, rewards, beside))
        if stage.before and stage.after:
            write_json(job.run.path / "summary.json", summary(stage, rewards, beside))
    job.mesh.barrier()
    return {f"{name}/t{t:g}/reward": estimate(r).value for (name, t), r in rewards.items()}


def _play(stage: Score, job: Job, tasks: Tasks, sampler: Sampler, chosen: list[Any], name: str, temperature: float) -> Rewards:
    """One model's rewards of all tasks, at one temperature; the first few episodes go to the report."""
    samples = stage.samples if temperature else 1
    share = job.mesh.share(list(enumerate(chosen)))

    def play() -> list[Trajectory]:
        asked = [tasks.episode(task, i, k) for i, task in share for k in range(samples)]
        played = tasks.play(sampler, asked, tasks.params(stage.max_new_tokens, temperature), fold(job.recipe.seed, 3))
        if job.mesh.is_main:
            job.run.write_rollouts(f"{stage.name}-{name}-t{temperature:g}", 0, picture(0, asked, played, tasks.shown))
        return played

    return by_task([t for part in job.mesh.gather(job.mesh.from_leader(play)) for t in part], len(chosen))


def _baselines(tasks: Tasks, chosen: list[Any]) -> dict[str, Rewards]:
    """What trivial policies score, and the demonstrations where every task has one."""
    beside = {name: by_task(tasks.baseline(policy, chosen), len(chosen)) for name, policy in tasks.baselines().items()}
    lessons = [tasks.demonstration(task) or [] for task in chosen]
    if all(lessons):
        played = tasks.scripted(chosen, lambda i, turn: lessons[i][turn] if turn < len(lessons[i]) else "")
        beside[TRUTH] = by_task(played, len(chosen))
    return beside


def by_task(played: list[Trajectory], n: int) -> Rewards:
    """The mean reward of every task."""
    valid: dict[int, list[float]] = {}
    for trajectory in played:
        if not isinstance(trajectory.reward, Invalid):
            valid.setdefault(trajectory.prompt_id, []).append(trajectory.reward)
    return [sum(valid[i]) / len(valid[i]) if i in valid else None for i in range(n)]


def estimate(rewards: Rewards) -> Estimate:
    """The mean over the tasks that have a reward."""
    return mean([r for r in rewards if r is not None])


def gain(after: Rewards, before: Rewards) -> Estimate:
    """The mean change over the tasks that both have a reward of."""
    return mean([a - b for a, b in zip(after, before, strict=True) if a is not None and b is not None])


def heat(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def table(stage: Score, rewards: dict[tuple[str, float], Rewards], beside: dict[str, Rewards]) -> dict[str, Any]:
    """Mean reward of baselines, models and demonstrations, as the report draws it."""

    def row(name: str, kind: str, cells: list[Rewards]) -> dict[str, Any]:
        return {"name": name, "kind": kind, "cells": [estimate(cell).to_cell() for cell in cells]}

    width = len(stage.temperatures)
    rows = [row(name, "baseline", [r] * width) for name, r in beside.items() if name != TRUTH]
    for name in stage.models:
        rows.append(row(name, "control" if name == stage.control else "model", [rewards[name, t] for t in stage.temperatures]))
    if TRUTH in beside:
        rows.append(row(TRUTH, "ceiling", [beside[TRUTH]] * width))
    first = next(iter(rewards.values()))
    missing = sum(r is None for cell in (*rewards.values(), *beside.values()) for r in cell)
    return {
        "title": "Held-out tasks: mean reward",
        "unit": "reward",
        "columns": [heat(t) for t in stage.temperatures],
        "rows": rows,
        "note": f"n = {len(first)} tasks that are never trained on, {stage.samples} samples each above temperature 0; 95 % intervals. "
        f"{missing} results were invalid and are left out.",
    }


def summary(stage: Score, rewards: dict[tuple[str, float], Rewards], beside: dict[str, Rewards]) -> dict[str, Any]:
    """What happened, in plain words."""
    assert stage.before and stage.after
    t = stage.temperatures[-1]
    before, after = rewards[stage.before, t], rewards[stage.after, t]
    change = gain(after, before)
    verb = "raised" if change.low > 0 else "lowered" if change.high < 0 else "did not clearly change"
    headline = f"{stage.after} {verb} the mean reward on held-out tasks: {words(estimate(before))} before, {words(estimate(after))} after."
    others = "; ".join(f"{name} {words(estimate(r))}" for name, r in beside.items())
    paragraphs = [f"{heat(t).capitalize()}, {change.n} tasks: the change is {words(change)}. Beside it: {others}."]
    if stage.control:
        paragraphs.append(f"Minus the control {stage.control}: {words(gain(after, rewards[stage.control, t]))}.")
    return {"headline": headline, "paragraphs": paragraphs}


def words(value: Estimate) -> str:
    return f"{value.value:.3f} ({value.low:.3f} to {value.high:.3f})"
