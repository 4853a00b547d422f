"""What the record of RL on clips says: where the time went, and whether the samples of a clip differ."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def time_table(name: str, steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Where the time of a step goes; the first of several warms up and is left out."""
    steps = steps[1:] or steps
    whole, rollout, judge = (
        statistics.median(row[f"time/{part}_s"] for row in steps) for part in ("step", "rollout", "judge")
    )
    parts = {"sampling": rollout - judge, "judging": judge, "learning": whole - rollout}
    cells = [
        whole,
        *(seconds / whole for seconds in parts.values()),
        statistics.median(r["time/judged_frames_per_s"] for r in steps),
    ]
    columns = ["step, s", *(f"share of {part}" for part in parts), "judged frames/s"]
    note = (
        f"Medians over {len(steps)} steps; judging is decoding all samples of a step and comparing them with the truth."
    )
    return {
        "title": f"Time of a step: {name}",
        "columns": columns,
        "rows": [{"name": name, "kind": "model", "cells": cells}],
        "note": note,
        "facts": True,  # times, so no baseline stands beside them
    }


def room(samples: Sequence[tuple[int, float]]) -> dict[str, float]:
    """How much the rewards of one clip's samples differ, from (clip, reward): without a spread inside groups nothing
    can be learnt.
    """
    groups: dict[int, list[float]] = {}
    for prompt, reward in samples:
        groups.setdefault(prompt, []).append(reward)
    several = [g for g in groups.values() if len(g) > 1]
    if not several:
        return {}
    spread = statistics.fmean(statistics.stdev(g) for g in several)
    return {
        "reward/group_std": spread,
        "reward/best_minus_mean": statistics.fmean(max(g) - statistics.fmean(g) for g in several),
    }
