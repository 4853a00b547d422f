"""Learning curves in the file of record: a run's metrics become a few rows for each arm, and such rows become a
picture.

A row's case ends in `curve of METRIC`, its metric is the last step of a stretch, its value the mean over that stretch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from html import escape
from pathlib import Path

from ..core.metrics import MetricsFile
from .record import Row, latest_run

METRICS = ("agent/success", "reward/mean")  # the first that a stage has
STRETCHES = 15
MARK = ": curve of "
LEFT, TOP, WIDTH, HEIGHT = 52, 44, 520, 240
COLORS = ("#d9480f", "#1c7ed6", "#868e96", "#2f9e44", "#9c36b5", "#e8a200")


def curves(run: Path) -> Iterator[tuple[str, str, int, float]]:
    """(metric, stage, last step, mean) of at most `STRETCHES` stretches of every stage that has one."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in MetricsFile(run / "metrics.jsonl").rows():
        key = next((key for key in METRICS if key in row), None)
        if key:
            found.setdefault((key, row["stage"]), []).append((row["step"], float(row[key])))
    for (key, stage), points in found.items():
        size = -(-len(points) // STRETCHES)
        for start in range(0, len(points), size):
            stretch = points[start : start + size]
            yield key, stage, stretch[-1][0], statistics.fmean(value for _, value in stretch)


def lines_of(rows: list[Row], bench: str, metric: str) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """(arm, case) -> points, of the newest run of a bench that has curves of the metric."""
    drawn = [row for row in rows if row.bench == bench and row.case.endswith(MARK + metric)]
    newest = latest_run(drawn, bench) if drawn else None
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in drawn:
        if row.run_id == newest:
            lines.setdefault((row.impl, row.case.removesuffix(MARK + metric)), []).append((int(row.metric), row.value))
    return {key: sorted(points) for key, points in lines.items()}


def chart(rows: list[Row], bench: str, metric: str, title: str) -> str:
    """SVG of a share by step: an arm has a colour, a seed a line."""
    lines = lines_of(rows, bench, metric)
    if not lines:
        raise ValueError(f"no curves of {metric!r} in bench {bench!r}")
    arms = list(dict.fromkeys(arm for arm, _ in lines))
    steps = max(step for points in lines.values() for step, _ in points)
    top = max(0.1, max(value for points in lines.values() for _, value in points))

    def place(step: float, value: float) -> str:
        return f"{LEFT + WIDTH * step / steps:.1f} {TOP + HEIGHT * (1 - value / top):.1f}"

    parts = [f'<text x="16" y="22" class="t">{escape(title)}</text>']
    for tick in range(int(top * 10) + 1):
        y = TOP + HEIGHT * (1 - tick / 10 / top)
        parts.append(
            f'<path d="M{LEFT} {y:.1f}h{WIDTH}" class="g"/><text x="{LEFT - 8}" y="{y + 4:.1f}" '
            f'class="e">{tick * 10} %</text>'
        )
    for (arm, _), points in lines.items():
        path = "M" + "L".join(place(step, value) for step, value in points)
        parts.append(f'<path d="{path}" stroke="{COLORS[arms.index(arm) % len(COLORS)]}" class="l"/>')
    for index, arm in enumerate(arms):
        y = TOP + 14 + 20 * index
        parts.append(f'<path d="M{LEFT + WIDTH + 16} {y - 4}h18" stroke="{COLORS[index % len(COLORS)]}" class="l"/>')
        parts.append(f'<text x="{LEFT + WIDTH + 40}" y="{y}">{escape(arm)}</text>')
    below = TOP + HEIGHT + 20
    parts.append(
        f'<text x="{LEFT}" y="{below}">step 0</text><text x="{LEFT + WIDTH}" y="{below}" class="e">{steps}</text>'
    )
    style = (
        "text{font:12px system-ui,sans-serif;fill:#555}.t{font-size:15px;font-weight:700}.e{text-anchor:end}"
        ".g{stroke:#e5e9ed}.l{fill:none;stroke-width:2;stroke-linejoin:round}"
    )
    size = f'width="760" height="{below + 12}" viewBox="0 0 760 {below + 12}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><style>{style}</style>{"".join(parts)}</svg>\n'
