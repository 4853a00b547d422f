"""Reward of web-page world models: F1 of the items in the sections New, Deleted and Updated.

*faithful* repeats the public judge: lines are compared as they stand, `None` is an item like any other, and text under
a header counts wherever it stands. So an answer of three times None gets 0.67 on a page where one thing changed.
*strict* drops the reasoning, wants the three sections in order, counts no `None`, and counts a repeated line against
the answer. The two are never mixed in one table.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

Mode = Literal["faithful", "strict"]
HEADERS = ("New items:", "Deleted items:", "Updated items:")
NOTHING = "\n\n".join(f"{header}\nNone" for header in HEADERS)
MAX_CHARS = 200_000
THINK_END = "</think>"


@dataclass(frozen=True)
class Verdict:
    """One judgement. `reason` says why an answer got 0 without being compared."""

    reward: float
    precision: float = 0.0
    recall: float = 0.0
    reason: str = ""


Sections = tuple[Counter[str], Counter[str], Counter[str]]


def read_sections(text: str, mode: Mode = "faithful") -> Sections | str:
    """The items of the three sections, or why there are none."""
    if len(text) > MAX_CHARS:
        return f"longer than {MAX_CHARS} characters"
    if mode == "strict":
        lines = [line.strip() for line in text.rpartition(THINK_END)[2].split("\n")]
        starts = [i for i, line in enumerate(lines) if line == HEADERS[0]]
        if not starts:
            return f"no line {HEADERS[0]!r}"
        lines = lines[starts[-1] :]
        order = [line for line in lines if line in HEADERS]
        if order != list(HEADERS):
            return f"sections {order[:4]} are not {', '.join(HEADERS)} in this order"
    else:
        lines = [line.strip() for line in text.split("\n")]
    sections: Sections = (Counter(), Counter(), Counter())
    current = None
    for line in lines:
        if not line:
            continue
        if line.startswith(HEADERS):
            current = sections[next(i for i, header in enumerate(HEADERS) if line.startswith(header))]
        elif current is not None and not (mode == "strict" and line == "None"):
            current[line] += 1
    if mode == "faithful":
        for section in sections:
            for line in section:
                section[line] = 1
        if not any(sections):
            return "no items"
    return sections


def compare(predicted: Sections, true: Sections) -> Verdict:
    """Pooled precision, recall and F1. When neither has an item they agree."""
    right = sum((p & t).total() for p, t in zip(predicted, true, strict=True))
    said, there = sum(p.total() for p in predicted), sum(t.total() for t in true)
    if not said and not there:
        return Verdict(1.0, 1.0, 1.0)
    precision, recall = right / said if said else 0.0, right / there if there else 0.0
    return Verdict(2 * precision * recall / (precision + recall) if right else 0.0, precision, recall)


def judge(response: str, truth: str | Sections, mode: Mode = "faithful") -> Verdict:
    """Judge a whole response against the true change list (text, or its sections read once). Nothing a model writes
    raises or hangs.
    """
    predicted = read_sections(response, mode)
    if isinstance(predicted, str):
        return Verdict(0.0, reason=predicted)
    true = read_sections(truth, mode) if isinstance(truth, str) else truth
    if isinstance(true, str):
        raise ValueError(f"the true change list is no answer: {true}")
    return compare(predicted, true)
