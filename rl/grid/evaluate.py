"""Scores of a world model's imagination on held-out tasks beside its trivial baseline, and the tables and words made
of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...data.tokenizers import CharTokenizer
from ...data.trajectory import Invalid
from ..evaluation import TEST, Evaluation, Results, heat, percent, points
from ..rollout.episodes import rollout
from ..rollout.sampler import Sampler, SamplingParams
from ..statistics import Estimate, mean_share, paired_difference, proportion
from .imagination import ImaginationEpisode, ImaginationTask


@dataclass(frozen=True)
class TaskScore:
    """What one imagined rollout got right. Changed-cell accuracy is None where the true states did not change."""

    first_exact: bool
    all_exact: bool
    first_changed: float | None
    all_changed: float | None


def score_predictions(task: ImaginationTask, predictions: Sequence[str]) -> TaskScore:
    """Exactness of the first and of all states; changed cells are those where the truth differs from the state
    before it.
    """
    exact = [p == t for p, t in zip(predictions, task.truths, strict=True)]
    before = (task.state, *task.truths[:-1])
    right, changed = [], []
    for old, truth, prediction in zip(before, task.truths, predictions, strict=True):
        cells = [i for i in range(len(truth)) if truth[i] != old[i]]
        changed.append(len(cells))
        right.append(sum(i < len(prediction) and prediction[i] == truth[i] for i in cells))
    return TaskScore(
        exact[0],
        all(exact),
        right[0] / changed[0] if changed[0] else None,
        sum(right) / sum(changed) if sum(changed) else None,
    )


def copy_baseline(tasks: Sequence[ImaginationTask]) -> list[TaskScore]:
    """Predicting that nothing ever changes."""
    return [score_predictions(task, [task.state] * len(task.truths)) for task in tasks]


def imagine(
    sampler: Sampler, tasks: Sequence[ImaginationTask], tokenizer: CharTokenizer, temperature: float, seed: int
) -> tuple[list[TaskScore], list[ImaginationEpisode]]:
    """One rollout of every task at a temperature."""
    episodes = [ImaginationEpisode(task, 0, tokenizer) for task in tasks]
    params = SamplingParams(max_new_tokens=len(tokenizer.encode(tasks[0].state)), temperature=temperature)
    rollout(sampler, episodes, params, seed)
    return [score_predictions(e.task, e.texts()) for e in episodes], episodes


@dataclass(frozen=True)
class Summary:
    """The four scores of a model, each with its interval."""

    first_exact: Estimate
    all_exact: Estimate
    first_changed: Estimate
    all_changed: Estimate

    def cells(self) -> list[dict]:
        return [e.to_cell() for e in (self.first_exact, self.all_exact, self.first_changed, self.all_changed)]


def summarise(judged: Sequence[TaskScore | Invalid]) -> Summary:
    """Means over valid tasks with 95 % intervals."""
    scores = [score for score in judged if isinstance(score, TaskScore)]
    return Summary(
        proportion(sum(s.first_exact for s in scores), len(scores)),
        proportion(sum(s.all_exact for s in scores), len(scores)),
        mean_share([s.first_changed for s in scores if s.first_changed is not None]),
        mean_share([s.all_changed for s in scores if s.all_changed is not None]),
    )


def score_columns(steps: int) -> list[str]:
    """Names of a summary's cells."""
    return ["1 step exact", f"all {steps} steps exact", "1 step changed cells", f"{steps} steps changed cells"]


def results(evaluation: Evaluation, tasks: list[ImaginationTask], rooms: int) -> Results:
    """A table for each temperature, the share of exact imaginations of each model, and a summary where two are
    compared.
    """
    tables = {f"t{t:g}": _table(evaluation, tasks, rooms, t) for t in evaluation.temperatures}
    judged = {(name, t): [samples[0] for samples in found] for (name, t, _), found in evaluation.judged.items()}
    outcome = {f"{name}/t{t:g}/all_exact": summarise(scores).all_exact.value for (name, t), scores in judged.items()}
    compared = evaluation.before and evaluation.after
    return Results(tables, outcome, _summary(evaluation, tasks) if compared else None)


def _table(evaluation: Evaluation, tasks: list[ImaginationTask], rooms: int, temperature: float) -> dict[str, Any]:
    """One temperature's table, as the report draws it."""
    k, found = len(tasks[0].truths), evaluation.firsts(TEST, temperature)
    lines = [("copy the state", "baseline", copy_baseline(tasks))]
    lines += [(_label(evaluation, name), evaluation.kind_of(name), found[name]) for name in evaluation.models]
    lines.append(("the true world", "ceiling", [score_predictions(t, t.truths) for t in tasks]))
    return {
        "title": f"Held-out rooms, {heat(temperature)}",
        "columns": score_columns(k),
        "rows": [{"name": name, "kind": kind, "cells": summarise(scores).cells()} for name, kind, scores in lines],
        "note": f"n = {len(tasks)} tasks in {rooms} rooms whose layout occurs in no training room; "
        "95 % intervals. A changed cell is one where the truth differs from the true state before it.",
    }


def _label(evaluation: Evaluation, name: str) -> str:
    """A model as a reader knows it."""
    if name == evaluation.control:
        return f"{name}: more pre-training, same gradient tokens"
    imitated = evaluation.trained_by.get(name) == "sft"
    return f"{name}: next-state pre-training" if imitated else f"{name}: after RL with verifiable reward"


def _gain(after: Sequence[TaskScore | Invalid], before: Sequence[TaskScore | Invalid]) -> Estimate:
    """The change of the share of exact imaginations, over the tasks that both have a score of."""
    both = [(a, b) for a, b in zip(after, before, strict=True) if isinstance(a, TaskScore) and isinstance(b, TaskScore)]
    return paired_difference([a.all_exact for a, _ in both], [b.all_exact for _, b in both])


def _summary(evaluation: Evaluation, tasks: list[ImaginationTask]) -> dict[str, Any]:
    """What happened, in plain words."""
    assert evaluation.before and evaluation.after
    k, t, pair = len(tasks[0].truths), evaluation.temperatures[-1], (evaluation.before, evaluation.after)
    judged = evaluation.firsts(TEST)
    before, after = (summarise(judged[name]).all_exact for name in pair)
    change = _gain(judged[evaluation.after], judged[evaluation.before])
    verb = "raised" if change.low > 0 else "lowered" if change.high < 0 else "did not clearly change"
    paragraphs = [
        f"At temperature {t:g} the change is {points(change)} on the same {change.n} tasks in held-out rooms, where "
        f"all {k} predicted states must be right. Copying the state scores "
        f"{percent(summarise(copy_baseline(tasks)).all_exact)}; the true world 100 %."
    ]
    if evaluation.control:
        control, gap = (
            summarise(judged[evaluation.control]).all_exact,
            _gain(judged[evaluation.after], judged[evaluation.control]),
        )
        paragraphs.append(
            f"Control, more pre-training for the same gradient tokens: {percent(control)} (RLVR minus control: "
            f"{points(gap)})."
        )
    if 0.0 in evaluation.temperatures and t != 0.0:
        greedy = evaluation.firsts(TEST, 0.0)
        names = [*pair, *([evaluation.control] if evaluation.control else [])]
        paragraphs.append(
            "Greedy: " + ", ".join(f"{name} {percent(summarise(greedy[name]).all_exact)}" for name in names) + "."
        )
    return {
        "headline": f"RLVR {verb} the share of exact {k}-step imaginations from {percent(before)} to {percent(after)}.",
        "paragraphs": paragraphs,
        # the report opens with one room, imagined by both
        "compare": [{"name": _label(evaluation, name), "rollouts": evaluation.shown[name, TEST]} for name in pair],
    }
