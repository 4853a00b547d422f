"""What an evaluation on web sites says: success by site with intervals, beside the random policy and the oracle
where they play.
"""

from __future__ import annotations

from typing import Any

from ...data.trajectory import Invalid
from ..evaluation import TEST, Evaluation, Results, heat, percent
from ..language_tasks import ending
from ..statistics import Estimate, paired_difference, proportion

ALL, RANDOM, ORACLE = "all", "random policy", "oracle"
Outcomes = dict[tuple[int, int], tuple[str, bool]]  # (task, sample) -> (site, solved)


def site_results(evaluation: Evaluation, ends: dict[str, Outcomes]) -> Results:
    """One table with a column a site; `ends` are those who play beside the models."""
    sites = sorted({task.task.sites[0] for task in evaluation.tasks[TEST]})
    tables, models, lost = {}, dict[str, Outcomes](), 0
    for temperature in evaluation.temperatures:  # the last one's is the table of the outcome
        models = {name: outcomes_of(evaluation, name, temperature) for name in evaluation.models}
        played = sum(len(samples) for name in models for samples in evaluation.judged[name, temperature, TEST])
        lost = played - sum(map(len, models.values()))
        note = (
            f"{len(evaluation.tasks[TEST])} test tasks, {evaluation.samples} samples, {heat(temperature)}; "
            "Wilson's 95 % intervals; "
        )
        note += f"{lost} invalid episodes left out. Tasks that span sites count under their first."
        note += "" if RANDOM in ends else " The random policy was not played on these sites (env.random_elsewhere)."
        rows = rows_of(models, ends, sites)
        tables[ending(evaluation, temperature)] = {
            "title": "Success on held-out tasks",
            "columns": [ALL, *sites],
            "rows": rows,
            "note": note,
        }
    outcome = {row["name"]: row["cells"][0] for row in rows_of(models, ends, sites)}
    first = evaluation.models[0]
    for name in evaluation.models[1:]:
        outcome[f"{name} minus {first}/success"] = gain(models[name], models[first]).to_cell()
    summary = (
        _summary(evaluation.before, evaluation.after, models, ends) if evaluation.before and evaluation.after else None
    )
    return Results(tables, {"tasks": len(evaluation.tasks[TEST]), "invalid": lost, **outcome}, summary)


def outcomes_of(evaluation: Evaluation, model: str, temperature: float) -> Outcomes:
    """What a model's valid episodes came to."""
    judged = enumerate(evaluation.judged[model, temperature, TEST])
    return {(i, k): end for i, samples in judged for k, end in enumerate(samples) if not isinstance(end, Invalid)}


def rows_of(models: dict[str, Outcomes], ends: dict[str, Outcomes], sites: list[str]) -> list[dict[str, Any]]:
    """The table's rows: the random policy where it played, the models, the oracle where there is one."""
    first = [_row(name, "baseline", outcomes, sites) for name, outcomes in ends.items() if name != ORACLE]
    last = [_row(ORACLE, "ceiling", ends[ORACLE], sites)] if ORACLE in ends else []
    return [*first, *(_row(name, "model", outcomes, sites) for name, outcomes in models.items()), *last]


def _row(name: str, kind: str, outcomes: Outcomes, sites: list[str]) -> dict[str, Any]:
    cells = []
    for site in (ALL, *sites):
        here = [solved for where, solved in outcomes.values() if site in (ALL, where)]
        cells.append(proportion(sum(here), len(here)).to_cell() if here else "none")
    return {"name": name, "kind": kind, "cells": cells}


def gain(one: Outcomes, other: Outcomes) -> Estimate:
    """The difference in success over the same tasks and samples."""
    both = sorted(set(one) & set(other))
    return paired_difference([one[k][1] for k in both], [other[k][1] for k in both])


def _summary(before: str, after: str, models: dict[str, Outcomes], ends: dict[str, Outcomes]) -> dict[str, Any]:
    def rate(outcomes: Outcomes) -> str:
        return percent(proportion(sum(solved for _, solved in outcomes.values()), len(outcomes)))

    change = gain(models[after], models[before])
    return {
        "headline": (
            f"{after} solves {rate(models[after])} of the held-out tasks; {before} solved {rate(models[before])}."
        ),
        "paragraphs": [
            (
                f"Over the same tasks: {100 * change.value:+.1f} points ({100 * change.low:+.1f} to "
                f"{100 * change.high:+.1f}), n = {change.n}."
            ),
            *(f"{name}: {rate(outcomes)}." for name, outcomes in {**models, **ends}.items()),
        ],
    }
