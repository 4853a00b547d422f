"""Evaluations of several models on held-out tasks: the judgements, and the results that an environment makes of them.

An environment with plain rewards can use `reward_results`, which compares means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..data.trajectory import Invalid, Trajectory
from .statistics import Estimate, mean, mean_change, mean_or_share

Rewards = list[float | None]  # per task, the mean over its samples; None if all of them are Invalid
ByModel = dict[tuple[str, float], Rewards]  # and temperature
TEST = "test"  # the part of the held-out tasks that every environment has
TRUTH = "demonstrations"
SHOWN = 12  # episodes kept for the report
REASON = 300  # characters of a fault's reason in a table's note
PARTS = {
    "right_answer": "right answer",
    "success": "solved",
    "penalty": "format penalty",
    "bonus": "bonus for states",
}  # shown beside the reward
Judged = dict[tuple[str, float, str], list[list[Any]]]  # by model, temperature and part: for each task, each sample's


@dataclass(frozen=True)
class Evaluation:
    """What several models did on held-out tasks."""

    models: list[str]
    temperatures: list[float]  # the summary is about the last one
    samples: int  # samples per task, at temperatures above 0
    tasks: dict[str, list[Any]]  # by part
    judged: Judged
    before: str | None = None  # the summary compares this model ...
    after: str | None = None  # ... with this one
    control: str | None = None
    controls: tuple[str, ...] = ()  # all that the report marks as controls
    costs: dict[str, tuple[int, int]] = field(default_factory=dict)  # actions and gradient tokens of the training
    trained_by: dict[str, str] = field(default_factory=dict)  # by model: the kind of the stage that trained it
    # by model and part: what the environment measured by log-probs
    probes: dict[tuple[str, str], Any] = field(default_factory=dict)
    # by model and part: its kept episodes, at the first temperature
    shown: dict[tuple[str, str], str] = field(default_factory=dict)
    known: int = 0  # number of tasks that are also training tasks

    @property
    def trained(self) -> bool:
        """Whether the recipe trained one of the models: only then are the tasks known to be held out."""
        return any(kind != "start" for kind in self.trained_by.values())

    @property
    def task_word(self) -> str:
        """The word for a task of the part `test`."""
        return "held-out task" if self.trained and not self.known else "test task"

    def kind_of(self, model: str) -> str:
        """The kind of a model's row in the report."""
        return "control" if model == self.control or model in self.controls else "model"

    def firsts(self, part: str, temperature: float | None = None) -> dict[str, list[Any]]:
        """By model, the judgement of each task's first sample; the last temperature where none is named."""
        at = self.temperatures[-1] if temperature is None else temperature
        return {model: [samples[0] for samples in self.judged[model, at, part]] for model in self.models}

    def compared(self) -> list[tuple[str, str]]:
        """The pairs of models whose difference on the same tasks is reported."""
        pairs = [(self.after, self.before), (self.after, self.control), (self.control, self.before)]
        return [(one, other) for one, other in pairs if one and other]


@dataclass(frozen=True)
class Results:
    """The results of an evaluation: tables by name (the empty name is the stage's own), numbers, a summary in words."""

    tables: dict[str, dict[str, Any]]
    outcome: dict[str, Any]
    summary: dict[str, Any] | None = None
    pages: dict[str, Any] = field(default_factory=dict)  # by folder of the run: further files for the report


def picture(
    step: int, episodes: Sequence[Any], trajectories: Sequence[Trajectory], turns: Callable[[Any], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """A few trajectories as the report shows them."""
    return [
        {
            "step": step,
            "prompt_id": t.prompt_id,
            "sample": t.sample_index,
            "reward": None if isinstance(t.reward, Invalid) else t.reward,
            "invalid": t.reward.reason if isinstance(t.reward, Invalid) else None,
            **{label: t.info[key] for key, label in PARTS.items() if key in t.info},
            "turns": turns(e),
        }
        for e, t in list(zip(episodes, trajectories, strict=True))[:SHOWN]
    ]


def spread(items: Sequence[Any], n: int) -> list[Any]:
    """At most n items, spread evenly over all of them."""
    return [items[int(i)] for i in np.linspace(0, len(items) - 1, min(n, len(items))).round()]


def heat(temperature: float) -> str:
    """A temperature in words."""
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def reward_results(evaluation: Evaluation, baselines: Callable[[list[Any]], dict[str, list[list[Any]]]]) -> Results:
    """Mean rewards of all models, beside those of trivial policies and demonstrations, which `baselines` plays."""
    trivial = baselines(evaluation.tasks[TEST])
    judged = {(name, t): found for (name, t, part), found in evaluation.judged.items() if part == TEST}
    faults = Counter(
        one.reason
        for found in (*judged.values(), *trivial.values())
        for samples in found
        for one in samples
        if isinstance(one, Invalid)
    )
    beside = {name: by_task(found) for name, found in trivial.items()}
    rewards = {key: by_task(found) for key, found in judged.items()}
    outcome: dict[str, Any] = {f"{name}/t{t:g}/reward": estimate(r, False).value for (name, t), r in rewards.items()}
    shares = are_shares(rewards, beside)
    for one, other in evaluation.compared():
        for t in evaluation.temperatures:  # much of a gain at temperature 1 may be sharpening, which greedy has not
            change = gain(rewards[one, t], rewards[other, t], shares)
            outcome[f"{one} minus {other}/reward, {heat(t)}"] = change.to_cell()
    summary = reward_summary(evaluation, rewards, beside, faults)
    return Results({"": reward_table(evaluation, rewards, beside, faults)}, outcome, summary)


def left_out(faults: Counter[str]) -> str:
    """How many results were Invalid, and the commonest reason."""
    n = faults.total()
    counted = "1 result was invalid and is left out" if n == 1 else f"{n} results were invalid and are left out"
    if not faults:
        return f"{counted}."
    reason, times = faults.most_common(1)[0]
    return f"{counted}; the commonest reason ({times} of them): {reason[:REASON].rstrip('.')}."


def by_task(judged: list[list[Any]]) -> Rewards:
    """The mean reward of every task."""
    valid = [[reward for reward in samples if not isinstance(reward, Invalid)] for samples in judged]
    return [sum(rewards) / len(rewards) if rewards else None for rewards in valid]


def are_shares(rewards: ByModel, beside: dict[str, Rewards]) -> bool:
    """Whether all rewards of an evaluation are between 0 and 1."""
    return all(0 <= r <= 1 for part in (*rewards.values(), *beside.values()) for r in part if r is not None)


def estimate(rewards: Rewards, shares: bool) -> Estimate:
    """The mean over tasks with a reward; with `shares`, rewards are between 0 and 1."""
    return (mean_or_share if shares else mean)([r for r in rewards if r is not None])


def gain(after: Rewards, before: Rewards, shares: bool) -> Estimate:
    """The mean change over the tasks for which both have a reward."""
    changes = [a - b for a, b in zip(after, before, strict=True) if a is not None and b is not None]
    return (mean_change if shares else mean)(changes)


def reward_table(
    evaluation: Evaluation, rewards: ByModel, beside: dict[str, Rewards], faults: Counter[str]
) -> dict[str, Any]:
    """Mean reward of baselines, models and demonstrations, as the report draws it."""

    shares = are_shares(rewards, beside)

    def row(name: str, kind: str, cells: list[Rewards]) -> dict[str, Any]:
        return {"name": name, "kind": kind, "cells": [estimate(cell, shares).to_cell() for cell in cells]}

    temperatures = evaluation.temperatures
    rows = [row(name, "baseline", [r] * len(temperatures)) for name, r in beside.items() if name != TRUTH]
    for name in evaluation.models:
        rows.append(row(name, evaluation.kind_of(name), [rewards[name, t] for t in temperatures]))
    if TRUTH in beside:
        rows.append(row(TRUTH, "ceiling", [beside[TRUTH]] * len(temperatures)))
    tasks = f"{len(evaluation.tasks[TEST])} tasks"
    if evaluation.known:
        tasks += f", {evaluation.known} of them among those to train on"
    elif evaluation.trained:
        tasks += " that are never trained on"
    before = "" if evaluation.trained else "What these models were trained on before is not known here. "
    return {
        "title": f"{evaluation.task_word.capitalize()}s: mean reward",
        "unit": "reward",
        "columns": [heat(t) for t in temperatures],
        "rows": rows,
        "note": f"n = {tasks}, {evaluation.samples} sample{'s' * (evaluation.samples > 1)} each above temperature 0; "
        "95 % intervals. "
        f"{before}{left_out(faults)}",
        **({"invalid": left_out(faults)} if faults else {}),
        **({"known": evaluation.known} if evaluation.known else {}),
    }


def reward_summary(
    evaluation: Evaluation, rewards: ByModel, beside: dict[str, Rewards], faults: Counter[str]
) -> dict[str, Any] | None:
    """What happened, in plain words; None where no two models are compared."""
    if not evaluation.before or not evaluation.after:
        return None
    t, task = evaluation.temperatures[-1], evaluation.task_word
    before, after = rewards[evaluation.before, t], rewards[evaluation.after, t]
    shares = are_shares(rewards, beside)
    change = gain(after, before, shares)
    figures = f"{words(estimate(before, shares))} before, {words(estimate(after, shares))} after"
    others = "; ".join(f"{name} {words(estimate(r, shares))}" for name, r in beside.items())
    if change.n:
        verb = "raised" if change.low > 0 else "lowered" if change.high < 0 else "did not clearly change"
        headline = f"{evaluation.after} {verb} the mean reward on {task}s: {figures}."
        tasks = f"{change.n} tasks" if change.n > 1 else "1 task, too few for an interval"
        said = f"{tasks}: the change is {words(change)}"
    else:
        headline = f"Nothing can be said of {evaluation.after}: no {task} has a valid result of both models."
        said = figures
    paragraphs = [f"{heat(t).capitalize()}, {said}. Beside it: {others}."]
    for at in evaluation.temperatures[:-1]:
        change = gain(rewards[evaluation.after, at], rewards[evaluation.before, at], shares)
        paragraphs.append(f"{heat(at).capitalize()}, the change is {words(change)}.")
    if evaluation.control:
        change = gain(after, rewards[evaluation.control, t], shares)
        paragraphs.append(f"Minus the control {evaluation.control}: {words(change)}.")
    return {"headline": headline, "paragraphs": [*paragraphs, left_out(faults)] if faults else paragraphs}


def words(value: Estimate) -> str:
    """A mean with its interval."""
    if value.n == 0:
        return "no valid result"
    if value.n == 1:
        return f"{value.value:.3f}"  # one task has no interval
    if value.all_equal:
        return f"{value.value:.3f} (all equal)"
    return f"{value.value:.3f} ({value.low:.3f} to {value.high:.3f})"


def verdict(gain: Estimate) -> str:
    """A gain in one word."""
    return "rose" if gain.low > 0 else "fell" if gain.high < 0 else "did not change beyond chance:"


def percent(estimate: Estimate) -> str:
    """A share with half the width of its interval."""
    if estimate.all_equal:
        return f"{100 * estimate.value:.1f} % (all equal)"
    return f"{100 * estimate.value:.1f} % (±{50 * (estimate.high - estimate.low):.1f})"


def points(estimate: Estimate, unit: str = "points") -> str:
    """A difference of shares with its interval."""
    if estimate.all_equal:
        return f"{100 * estimate.value:+.1f} {unit} (all equal)"
    low, high = 100 * estimate.low, 100 * estimate.high
    return f"{100 * estimate.value:+.1f} {unit} (95 % interval {low:+.1f} to {high:+.1f})"
