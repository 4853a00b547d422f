"""Evaluation tables as a report shows them: percentages, 95 % intervals as small bars, one body of rows for each
run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...rl.statistics import has_width
from .curves import short
from .load import RunData, number

KINDS = ("baseline", "model", "control", "ceiling")


@dataclass(frozen=True)
class Cell:
    """A score ready to print; `dot`, `left`, `width` and `base` (the best baseline) are per cent of the bar's
    length.
    """

    text: str
    interval: str
    sample: str
    dot: float | None = None
    left: float = 0.0
    width: float = 0.0
    base: float | None = None


@dataclass(frozen=True)
class Row:
    name: str
    kind: str
    cells: list[Cell]


@dataclass(frozen=True)
class Table:
    """Tables of the same title and columns in several runs become one, `bodies` holding (run name, rows, note)."""

    title: str
    columns: list[str]
    bodies: list[tuple[str, list[Row], str]]


def values_of(cell: Any) -> dict[str, float | None]:
    """value, low, high and n of a cell; a bare number is a value without the rest. An interval without a width, as of
    rewards that are all equal, says nothing and is left out.
    """
    if not isinstance(cell, dict):
        cell = {"value": cell}
    numbers = {key: number(cell.get(key)) for key in ("value", "low", "high", "n")}
    found = {key: value if value is not None and math.isfinite(value) else None for key, value in numbers.items()}
    value, low, high = found["value"], found["low"], found["high"]
    if value is not None and low is not None and high is not None and not has_width(value, low, high):
        found |= {"low": None, "high": None}
    return found


def shape_cell(raw: Any, percent: bool, low: float, high: float, base: float | None) -> Cell:
    cell = values_of(raw)
    value = cell["value"]
    if value is None:
        return Cell(str(raw) if isinstance(raw, str) else "–", "", "")

    def write(x: float) -> str:
        return f"{100 * x:.1f}" if percent else short(x)

    def place(x: float) -> float:
        return round(100 * min(1.0, max(0.0, (x - low) / (high - low))), 2) if high > low else 50.0

    start, stop = cell["low"], cell["high"]
    interval = f"{write(start)} – {write(stop)}" if start is not None and stop is not None else ""
    left = place(start) if start is not None else place(value)
    width = round(place(stop) - left, 2) if stop is not None else 0.0
    sample = f"n = {int(cell['n']):,}" if cell["n"] is not None else ""
    return Cell(
        write(value) + (" %" if percent else ""),
        interval,
        sample,
        place(value),
        left,
        width,
        place(base) if base is not None else None,
    )


def shape_rows(tables: list[dict[str, Any]], column_count: int) -> list[list[Row]]:
    """Rows of equal tables, their bars drawn on one scale for each column."""
    scales = []
    for index in range(column_count):
        cells = [values_of(row["cells"][index]) for table in tables for row in table["rows"]]
        seen = [value for cell in cells for key in ("value", "low", "high") if (value := cell[key]) is not None]
        percent = tables[0].get("unit") is None and bool(seen) and min(seen) >= 0 and max(seen) <= 1
        low, high = (0.0, 1.0) if percent else (min(seen, default=0.0), max(seen, default=1.0))
        scores = [
            values_of(row["cells"][index])["value"]
            for table in tables
            for row in table["rows"]
            if row.get("kind") == "baseline"
        ]
        best = min if tables[0]["columns"][index] in tables[0].get("lower", []) else max
        scales.append((percent, low, high, best((score for score in scores if score is not None), default=None)))
    return [
        [
            Row(
                str(row.get("name", "")),
                row["kind"] if row.get("kind") in KINDS else "other",
                [shape_cell(cell, *scale) for cell, scale in zip(row["cells"], scales, strict=True)],
            )
            for row in table["rows"]
        ]
        for table in tables
    ]


def build_tables(runs: list[RunData]) -> list[Table]:
    """Every evaluation table of the runs, those that can be compared put together."""
    groups: dict[tuple[str, ...], list[tuple[RunData, dict[str, Any]]]] = {}
    for run in runs:
        for table in run.results:
            groups.setdefault((table["title"], *table["columns"]), []).append((run, table))
    built = []
    for (title, *columns), members in groups.items():
        rows = shape_rows([table for _, table in members], len(columns))
        bodies = [(run.name, body, str(table["note"] or "")) for (run, table), body in zip(members, rows, strict=True)]
        built.append(Table(title, columns, bodies))
    return built
