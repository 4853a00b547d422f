"""How well a written state matches the true one: by cells and named things, no judge model. For online world-modelling
rewards.

An agent that writes what it sees and what it expects is paid for both (`world_model_bonus`), and only when its format
is right.
"""

from __future__ import annotations

import re
from collections import Counter

from ..agents.format import Parsed

_CELL = re.compile(r"\(\d{1,3},\d{1,3}\)")


def _grid(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n") if line.strip() and not _CELL.search(line)]


def cell_accuracy(said: str, truth: str) -> float:
    """Share of cells that are right, 0 when the shapes differ. Beware: copying the last state scores high here."""
    ours, theirs = _grid(said), _grid(truth)
    if [len(row) for row in ours] != [len(row) for row in theirs] or not theirs:
        return 0.0
    pairs = [(a, b) for row, true in zip(ours, theirs, strict=True) for a, b in zip(row, true, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def thing_f1(said: str, truth: str) -> float:
    """F1 over (place, symbol) of every cell that is not of the two commonest symbols (wall and floor): what moves
    and matters.
    """
    ours, theirs = _grid(said), _grid(truth)
    common = {symbol for symbol, _ in Counter("".join(theirs)).most_common(2)}

    def things(rows: list[str]) -> set[tuple[int, int, str]]:
        return {(r, c, symbol) for r, row in enumerate(rows) for c, symbol in enumerate(row) if symbol not in common}

    a, b = things(ours), things(theirs)
    return 2 * len(a & b) / (len(a) + len(b)) if a or b else float(ours == theirs)


def state_score(said: str | None, truth: str) -> float:
    """1 for the exact text (space at line ends aside), else half the F1 of things where the shape is right, else 0."""
    if said is None:
        return 0.0
    if [line.rstrip() for line in said.strip().split("\n")] == [line.rstrip() for line in truth.strip().split("\n")]:
        return 1.0
    return 0.5 * thing_f1(said, truth) if cell_accuracy(said, truth) > 0 else 0.0


def world_model_bonus(
    parsed: Parsed, before: str, after: str, observation: float = 0.5, prediction: float = 0.5
) -> float:
    """The extra reward of one turn: weighted scores of what was said to be seen and to come; 0 when the format is
    wrong.
    """
    if not parsed.ok:
        return 0.0
    return observation * state_score(parsed.observation, before) + prediction * state_score(parsed.prediction, after)
