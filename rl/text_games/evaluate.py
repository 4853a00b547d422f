"""Tables of text-game world models: unchanged, changed and overall accuracy beside copying and the oracle, by game
and by verb.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...data.trajectory import Invalid
from ..rewards.text_game import Mode, judge, state_difference
from ..rewards.text_game_transition import Transition
from ..statistics import Estimate, paired_difference, proportion
from .rows import action_of, verb_of

Row = dict[str, Any]
EMPTY = '{"modified": [], "removed": [], "score": {}}'
COLUMNS = ["unchanged", "changed", "overall"]


@dataclass(frozen=True)
class Judged:
    """One row's answer: whether it was right, whether the true state changes, and why it could not be read."""

    right: bool
    changed: bool
    game: str
    verb: str
    reason: str = ""


def judge_rows(rows: Sequence[Row], responses: Sequence[str | Invalid], mode: Mode) -> list[Judged | Invalid]:
    """Judge every response by the binary rule; a fault of the sampler stays Invalid and enters no statistic."""
    judged: list[Judged | Invalid] = []
    for row, response in zip(rows, responses, strict=True):
        if isinstance(response, Invalid):
            judged.append(response)
            continue
        step = Transition.from_row(row)
        verdict = judge(response, step, "binary", mode)
        judged.append(Judged(verdict.right, step.changed, row["game"], verb_of(action_of(row)), verdict.reason))
    return judged


def copy_answers(rows: Sequence[Row]) -> list[str | Invalid]:
    """The trivial answer: nothing changes."""
    return [EMPTY for _ in rows]


def oracle_answers(rows: Sequence[Row]) -> list[str | Invalid]:
    """The true difference: in faithful mode it is not always right, because created objects never are."""
    return [json.dumps(state_difference(Transition.from_row(row))) for row in rows]


def valid(judged: Sequence[Judged | Invalid]) -> list[Judged]:
    """What can be counted."""
    return [j for j in judged if isinstance(j, Judged)]


def accuracies(judged: Sequence[Judged | Invalid]) -> list[Estimate]:
    """Unchanged, changed and overall accuracy with Wilson's intervals."""
    good = valid(judged)
    parts = [[j for j in good if not j.changed], [j for j in good if j.changed], good]
    return [proportion(sum(j.right for j in part), len(part)) for part in parts]


def best(samples: Sequence[Judged | Invalid]) -> Judged | Invalid:
    """Of several samples of one row whether one is right; where one was lost, and none is right, nobody knows."""
    found = valid(samples)
    lost = next((j for j in samples if isinstance(j, Invalid)), None)
    right = next((j for j in found if j.right), None)
    return right or lost or next((j for j in found if not j.reason), found[0])


def _row(name: str, kind: str, judged: Sequence[Judged | Invalid]) -> dict[str, Any]:
    return {"name": name, "kind": kind, "cells": [e.to_cell() for e in accuracies(judged)]}


@dataclass(frozen=True)
class Model:
    """One model's answers to the rows of a table; kind is `model` or `control`."""

    name: str
    judged: Sequence[Judged | Invalid]
    kind: str = "model"


def table(rows: Sequence[Row], models: Sequence[Model], mode: Mode, title: str) -> dict[str, Any]:
    """The table of the published work with the lines it lacks, as the report draws it."""
    base, ceiling = (judge_rows(rows, answers(rows), mode) for answers in (copy_answers, oracle_answers))
    lines = [_row("no change", "baseline", base)]
    lines += [_row(model.name, model.kind, model.judged) for model in models]
    lines.append(_row("true difference", "ceiling", ceiling))
    return {"title": f"{title} ({mode})", "columns": COLUMNS, "rows": lines, "note": _note(rows, models, mode)}


def _note(rows: Sequence[Row], models: Sequence[Model], mode: Mode) -> str:
    unread = [
        f"{m.name}: {sum(bool(j.reason) for j in valid(m.judged))} of {len(m.judged)} answers unreadable"
        for m in models
    ]
    faults = [
        f"{m.name}: {len(m.judged) - len(valid(m.judged))} invalid"
        for m in models
        if len(valid(m.judged)) < len(m.judged)
    ]
    blind = (
        " Created objects are never right in this mode, so the true difference is below 100 %."
        if mode == "faithful"
        else ""
    )
    return ". ".join([f"n = {len(rows)} transitions, 95 % intervals, {mode} judge", *unread, *faults]) + "." + blind


def breakdown(rows: Sequence[Row], model: Model, mode: Mode, by: str) -> dict[str, Any]:
    """One model by `game` or by `verb`, each line beside what no change scores there."""
    if by not in ("game", "verb"):
        raise ValueError(f"by: {by!r} must be 'game' or 'verb'")
    base = valid(judge_rows(rows, copy_answers(rows), mode))
    ceiling = valid(judge_rows(rows, oracle_answers(rows), mode))
    key: Callable[[Judged], str] = lambda j: getattr(j, by)  # noqa: E731
    lines = [_with_copy("no change", "baseline", base, base)]
    for name in sorted({key(j) for j in base}):
        of_group = [j for j in valid(model.judged) if key(j) == name]
        lines.append(_with_copy(name, model.kind, of_group, [j for j in base if key(j) == name]))
    lines.append(_with_copy("true difference", "ceiling", ceiling, base))
    return {
        "title": f"{model.name} by {by} ({mode})",
        "columns": [*COLUMNS, "no change, overall"],
        "rows": lines,
        "note": (
            f"n = {len(rows)} transitions, 95 % intervals, {mode} judge. The last column is the trivial answer on "
            "the same rows."
        ),
    }


def _with_copy(name: str, kind: str, judged: Sequence[Judged], base: Sequence[Judged]) -> dict[str, Any]:
    line = _row(name, kind, judged)
    return {**line, "cells": [*line["cells"], accuracies(base)[2].to_cell()]}


def gains(after: Sequence[Judged | Invalid], before: Sequence[Judged | Invalid]) -> list[Estimate]:
    """How much more of the unchanged, the changed and all rows one model gets right than another, on rows both could
    be judged on.
    """
    pairs = [(a, b) for a, b in zip(after, before, strict=True) if isinstance(a, Judged) and isinstance(b, Judged)]
    parts = [[p for p in pairs if not p[0].changed], [p for p in pairs if p[0].changed], pairs]
    return [paired_difference([a.right for a, _ in part], [b.right for _, b in part]) for part in parts]
