"""Tables of web-page world models: precision, recall and F1 beside the empty answer and the true list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...data.trajectory import Invalid
from ..rewards.web_page import NOTHING, Mode, Verdict, judge
from ..statistics import Estimate, mean_change, mean_share, paired_difference, proportion

COLUMNS = ["precision", "recall", "F1", "F1, changed pages", "exact"]


def judge_pages(truths: Sequence[str], responses: Sequence[str | Invalid], mode: Mode) -> list[Verdict | Invalid]:
    """Judge every response; a fault of the sampler stays Invalid."""
    return [r if isinstance(r, Invalid) else judge(r, t, mode) for t, r in zip(truths, responses, strict=True)]


def scores(truths: Sequence[str], verdicts: Sequence[Verdict | Invalid]) -> list[Estimate]:
    """Means with 95 % intervals; pages where nothing changes are left out of the fourth."""
    good = [(t, v) for t, v in zip(truths, verdicts, strict=True) if isinstance(v, Verdict)]
    return [
        mean_share([v.precision for _, v in good]),
        mean_share([v.recall for _, v in good]),
        mean_share([v.reward for _, v in good]),
        mean_share([v.reward for t, v in good if t != NOTHING]),
        proportion(sum(v.reward == 1.0 for _, v in good), len(good)),
    ]


def gains(
    truths: Sequence[str], after: Sequence[Verdict | Invalid], before: Sequence[Verdict | Invalid]
) -> list[Estimate]:
    """How much more one model scores than another on the pages both could be judged on, by the columns of the table."""
    pairs = [
        (t, a, b)
        for t, a, b in zip(truths, after, before, strict=True)
        if isinstance(a, Verdict) and isinstance(b, Verdict)
    ]
    return [
        mean_change([a.precision - b.precision for _, a, b in pairs]),
        mean_change([a.recall - b.recall for _, a, b in pairs]),
        mean_change([a.reward - b.reward for _, a, b in pairs]),
        mean_change([a.reward - b.reward for t, a, b in pairs if t != NOTHING]),
        paired_difference([a.reward == 1.0 for _, a, _ in pairs], [b.reward == 1.0 for _, _, b in pairs]),
    ]


def table(
    truths: Sequence[str], models: Sequence[tuple[str, str, Sequence[Verdict | Invalid]]], mode: Mode, title: str
) -> dict[str, Any]:
    """The report's table; `models` holds (name, kind, verdicts)."""
    base = judge_pages(truths, [NOTHING] * len(truths), mode)
    ceiling = judge_pages(truths, list(truths), mode)
    lines = [("no change", "baseline", base), *models, ("true changes", "ceiling", ceiling)]
    rows = [{"name": name, "kind": kind, "cells": [e.to_cell() for e in scores(truths, v)]} for name, kind, v in lines]
    unread = [
        f"{name}: {sum(bool(v.reason) for v in vs if isinstance(v, Verdict))} answers unreadable"
        for name, _, vs in models
    ]
    changed = sum(t != NOTHING for t in truths)
    note = (
        ". ".join(
            [f"n = {len(truths)} transitions, {changed} of them change the page, 95 % intervals, {mode} judge", *unread]
        )
        + "."
    )
    if mode == "faithful":
        note += " This mode counts the line None as an item, so that answering no change is paid on changed pages too."
    return {"title": f"{title} ({mode})", "columns": COLUMNS, "rows": rows, "note": note}
