"""Held-out evaluation: every model beside the copy baseline and the true world, greedy and sampled, with intervals."""

from __future__ import annotations

from typing import Any

from ...core.files import read_json, write_json
from ...core.progress import Progress
from ...core.rng import fold
from ...rl.evaluate import Summary, TaskScore, copy_baseline, imagine, score_predictions, summarise
from ...rl.imagination import ImaginationTask, make_task
from ...rl.rollout.sampler import Sampler
from ...rl.statistics import Estimate, paired_difference
from ..job import Job
from ..settings.grid import Evaluate, Supervised
from .common import build_engine, sampler_of, sampling
from .grid import dynamics_of, tokenizer_of
from .on_policy import SHOWN
from .selfplay import ROOMS


def run(stage: Evaluate, job: Job) -> dict[str, Any]:
    """Evaluate, write the tables and the summary in words."""
    rooms = read_json(job.stage_folder(stage.tasks.source) / ROOMS)["heldout"]
    n = -(-stage.n // job.mesh.data_size) * job.mesh.data_size
    seed = fold(job.recipe.seed, 3)
    tasks = [make_task(dynamics_of(job), rooms, i, stage.tasks.steps, stage.tasks.walk, seed) for i in range(n)]
    progress = Progress(stage.name, len(stage.models) * len(stage.temperatures), speak=job.mesh.is_main)
    scores: dict[tuple[str, float], list[TaskScore]] = {}
    for name in stage.models:
        with sampling(job, stage.name, build_engine(job, None, name), sampler_of(stage, job)) as sampler:
            for temperature in stage.temperatures:
                scores[name, temperature] = score_part(stage, job, sampler, tasks, name, temperature, seed)
                progress.update(len(scores))
    if job.mesh.is_main:
        for temperature in stage.temperatures:
            job.run.write_result(f"{stage.name}-t{temperature:g}", table(stage, job, tasks, scores, temperature))
        if stage.before and stage.after:
            write_json(job.run.path / "summary.json", summary(stage, job, tasks, scores))
    job.mesh.barrier()
    return {f"{name}/t{t:g}/all_exact": summarise(s).all_exact.value for (name, t), s in scores.items()}


def score_part(
    stage: Evaluate, job: Job, sampler: Sampler, tasks: list[ImaginationTask], name: str, temperature: float, seed: int
) -> list[TaskScore]:
    """One model's scores of all tasks; the first few imaginations go to the report."""

    def play() -> list[TaskScore]:
        mine, episodes = imagine(sampler, job.mesh.share(tasks), tokenizer_of(job), temperature, seed)
        if job.mesh.is_main:
            shown = [
                {
                    "step": 0,
                    "prompt_id": e.prompt_id,
                    "sample": 0,
                    "reward": e.score()[1],
                    "invalid": None,
                    "turns": e.picture(dynamics_of(job)),
                }
                for e in episodes[:SHOWN]
            ]
            job.run.write_rollouts(f"{stage.name}-{name}-t{temperature:g}", 0, shown)
        return mine

    return [s for part in job.mesh.gather(job.mesh.from_leader(play)) for s in part]


def table(stage: Evaluate, job: Job, tasks: list[ImaginationTask], scores: dict, temperature: float) -> dict[str, Any]:
    """One temperature's table, as the report draws it."""
    k, rooms = stage.tasks.steps, job.outcome(stage.tasks.source)["heldout_rooms"]

    def row(name: str, kind: str, summary: Summary) -> dict[str, Any]:
        return {"name": name, "kind": kind, "cells": summary.cells()}

    rows = [row("copy the state", "baseline", summarise(copy_baseline(tasks)))]
    for name in stage.models:
        rows.append(row(label(stage, job, name), "control" if name == stage.control else "model", summarise(scores[name, temperature])))
    rows.append(row("the true world", "ceiling", summarise([score_predictions(t, t.truths) for t in tasks])))
    return {
        "title": f"Held-out rooms, {'greedy' if temperature == 0 else f'temperature {temperature:g}'}",
        "columns": ["1 step exact", f"all {k} steps exact", "1 step changed cells", f"{k} steps changed cells"],
        "rows": rows,
        "note": f"n = {len(tasks)} tasks in {rooms} rooms whose layout occurs in no training room; "
        "95 % intervals. A changed cell is one where the truth differs from the true state before it.",
    }


def label(stage: Evaluate, job: Job, name: str) -> str:
    """A stage's model as a reader knows it."""
    kind = next(s for s in job.recipe.stages if s.name == name)
    if name == stage.control:
        return f"{name}: more pre-training, same gradient tokens"
    return f"{name}: next-state pre-training" if isinstance(kind, Supervised) else f"{name}: after RL with verifiable reward"


def summary(stage: Evaluate, job: Job, tasks: list[ImaginationTask], scores: dict) -> dict[str, Any]:
    """What happened, in plain words."""
    assert stage.before and stage.after
    k, t = stage.tasks.steps, stage.temperatures[-1]
    before, after = summarise(scores[stage.before, t]).all_exact, summarise(scores[stage.after, t]).all_exact
    copy = summarise(copy_baseline(tasks)).all_exact
    change = paired_difference([s.all_exact for s in scores[stage.after, t]], [s.all_exact for s in scores[stage.before, t]])
    verb = "raised" if change.low > 0 else "lowered" if change.high < 0 else "did not clearly change"
    headline = f"RLVR {verb} the share of exact {k}-step imaginations from {percent(before)} to {percent(after)}."
    paragraphs = [
        f"At temperature {t:g} the change is {points(change)} "
        f"on the same {change.n} tasks in held-out rooms, where all {k} predicted states must be right. "
        f"Copying the state scores {percent(copy)}; the true world 100 %.",
    ]
    if stage.control:
        control = summarise(scores[stage.control, t]).all_exact
        gap = paired_difference([s.all_exact for s in scores[stage.after, t]], [s.all_exact for s in scores[stage.control, t]])
        paragraphs.append(
            f"Control, more pre-training for the same gradient tokens: {percent(control)} (RLVR minus control: {points(gap).rstrip(',')})."
        )
    if 0.0 in stage.temperatures and t != 0.0:
        names = [stage.before, stage.after, *([stage.control] if stage.control else [])]
        paragraphs.append("Greedy: " + ", ".join(f"{name} {percent(summarise(scores[name, 0.0]).all_exact)}" for name in names) + ".")
    pair = (stage.before, stage.after)  # the report opens with one room, imagined by both
    kept = [{"name": label(stage, job, name), "rollouts": f"{stage.name}-{name}-t{min(stage.temperatures):g}"} for name in pair]
    return {"headline": headline, "paragraphs": paragraphs, "compare": kept}


def points(change: Estimate) -> str:
    return f"{100 * change.value:+.1f} points, 95 % interval {100 * change.low:+.1f} to {100 * change.high:+.1f},"


def percent(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.1f} % (±{50 * (estimate.high - estimate.low):.1f})"
