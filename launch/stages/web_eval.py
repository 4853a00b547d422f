"""Agents on held-out tasks: success by site with intervals, beside the random policy and the oracle where they play."""

from __future__ import annotations

from typing import Any

from ...core.files import write_json
from ...core.progress import Progress
from ...core.rng import fold
from ...data.trajectory import Invalid
from ...rl.evaluation import percent
from ...rl.rollout.open import open_sampler
from ...rl.statistics import Estimate, paired_difference, proportion
from ...rl.webrl.episode import WebEpisode, act_randomly, demonstrate
from ...rl.worlds.web.generate import SiteTask
from ..job import Job
from ..settings.web import WebEvaluate, WebStart
from .common import build_engine
from .web import SHOWN, Players, begin_phase, lives_elsewhere, pool_of, seeded, start_of, strip

ALL = "all"
Results = dict[tuple[int, int], tuple[str, bool]]  # (task, sample) -> (site, solved)


def run(stage: WebEvaluate, job: Job) -> dict[str, Any]:
    """Play, and write one table with a column a site."""
    pool = pool_of(start_of(job), test=True)
    tasks = pool[: stage.n] if stage.n else pool
    seats = [(i, task, s) for i, task in enumerate(tasks) for s in range(stage.samples)]
    found: dict[str, Results] = {}
    invalid = 0
    progress = Progress(stage.name, len(stage.models), speak=job.mesh.is_main)
    for name in stage.models:
        engine = build_engine(job, None, name)
        folder = job.stage_folder(stage.name) / name
        opened = open_sampler(stage.rollouts.sampler, engine, job.model, folder, mesh=job.mesh)
        mine: Results = {}
        shown: list[dict[str, Any]] = []

        def note(seat: tuple[int, SiteTask, int], episode: WebEpisode, into: Results = mine, strips: list = shown) -> None:
            into[seat[0], seat[2]] = (seat[1].task.sites[0], episode.world.score >= 1.0)
            if len(strips) < SHOWN:
                strips.append(strip(seat, episode))

        begin_phase(job, test=True)
        players = Players(job, test=True)
        try:
            if opened.publish is not None:
                opened.publish(engine.steps)
            given = (opened.sampler, job.mesh.share(seats), stage.temperature, fold(job.recipe.seed, 41), stage.at_once, note)

            def play(players: Players = players, given: tuple = given, mine: Results = mine) -> tuple[Results, int]:
                played = players.play(*given)
                return mine, sum(isinstance(r, Invalid) for _, r in played)

            mine, lost = job.mesh.from_leader(play)
        finally:
            opened.close()
        if job.mesh.is_main:
            job.run.write_rollouts(f"{stage.name}-{name}", 0, shown)
        invalid += sum(job.mesh.gather(lost))
        found[name] = {key: value for part in job.mesh.gather(mine) for key, value in part.items()}
        progress.update(len(found))
    scripts, players = scripts_of(stage, start_of(job), tasks), Players(job, test=True)
    ends = job.mesh.from_main(lambda: {name: _scripted(job, stage, players, tasks, name) for name in scripts})
    sites = sorted({task.task.sites[0] for task in tasks})
    rows = rows_of({name: found[name] for name in stage.models}, ends, sites)
    told = {row["name"]: row["cells"][0] for row in rows}
    for name in stage.models[1:]:
        told[f"{name} minus {stage.models[0]}/success"] = _gain(found[name], found[stage.models[0]]).to_cell()
    if job.mesh.is_main:
        note_ = f"{len(tasks)} test tasks, {stage.samples} samples at temperature {stage.temperature:g}; Wilson's 95 % intervals; "
        note_ += f"{invalid} invalid episodes left out. Tasks that span sites count under their first."
        note_ += "" if "random policy" in ends else " The random policy was not played on these sites (random_elsewhere)."
        table = {"title": "Success on held-out tasks", "columns": [ALL, *sites], "rows": rows, "note": note_}
        job.run.write_result(stage.name, table)
        if stage.headline:
            write_json(job.run.path / "summary.json", _summary(stage, found, ends))
    return {"tasks": len(tasks), "invalid": invalid, **told}


def scripts_of(stage: WebEvaluate, start: WebStart, tasks: list[SiteTask]) -> list[str]:
    """Who plays beside the models. Without scripts, as on sites elsewhere, there is no oracle; and nobody clicks there at random unless
    the recipe says so."""
    found = ["random policy"] if stage.random_elsewhere or not lives_elsewhere(start, test=True) else []
    return [*found, "oracle"] if any(task.steps for task in tasks) else found


def rows_of(models: dict[str, Results], ends: dict[str, Results], sites: list[str]) -> list[dict[str, Any]]:
    """The table's rows: the random policy where it played, the models, the oracle where there is one."""
    first = [_row(name, "baseline", results, sites) for name, results in ends.items() if name != "oracle"]
    last = [_row("oracle", "ceiling", ends["oracle"], sites)] if "oracle" in ends else []
    return [*first, *(_row(name, "model", results, sites) for name, results in models.items()), *last]


def _scripted(job: Job, stage: WebEvaluate, players: Players, tasks: list[SiteTask], who: str) -> Results:
    results: Results = {}
    for number, task in enumerate(tasks):
        if who == "oracle" and not task.steps:
            continue
        episode = players.episode(0, task, number, 0)
        rng = seeded(job, f"{stage.name} {who} {number}")
        if who == "oracle":
            demonstrate(episode, 0.0, rng)
        else:
            act_randomly(episode, rng)
        results[number, 0] = (task.task.sites[0], episode.world.score >= 1.0)
    return results


def _row(name: str, kind: str, results: Results, sites: list[str]) -> dict[str, Any]:
    cells = []
    for site in (ALL, *sites):
        mine = [solved for where, solved in results.values() if site in (ALL, where)]
        cells.append(proportion(sum(mine), len(mine)).to_cell() if mine else "none")
    return {"name": name, "kind": kind, "cells": cells}


def _gain(mine: Results, theirs: Results) -> Estimate:
    """The difference in success over the same tasks and samples."""
    both = sorted(set(mine) & set(theirs))
    return paired_difference([mine[k][1] for k in both], [theirs[k][1] for k in both])


def _summary(stage: WebEvaluate, found: dict[str, Results], ends: dict[str, Results]) -> dict[str, Any]:
    def rate(results: Results) -> str:
        return percent(proportion(sum(solved for _, solved in results.values()), len(results)))

    assert stage.headline is not None
    best, first = found[stage.headline], found[stage.models[0]]
    gain = _gain(best, first)
    return {
        "headline": f"{stage.headline} solves {rate(best)} of the held-out tasks; {stage.models[0]} solved {rate(first)}.",
        "paragraphs": [
            f"Over the same tasks: {100 * gain.value:+.1f} points ({100 * gain.low:+.1f} to {100 * gain.high:+.1f}), n = {gain.n}.",
            *(f"{name}: {rate(results)}." for name, results in {**found, **ends}.items()),
        ],
    }
