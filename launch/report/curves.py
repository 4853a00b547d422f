"""Turns metric records into small-multiple panels: thinned points, axes, and the paths of an inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .health import NOT_METRICS
from .load import RunData, number

WIDTH, HEIGHT = 400, 196
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 22, 24
STAGE_GAP = 10
POINTS_IN_ALL = 60_000
POINTS_A_SERIES = 400
SERIES_A_PANEL = 6
LOG_FROM = 12  # a positive metric that spans more than this factor reads better on a log axis
SMOOTH_FROM = 30

Points = list[tuple[int, float]]


@dataclass(frozen=True)
class PanelSpec:
    """A panel of its own: `names` are metric names, or prefixes when they end in a slash."""

    title: str
    names: tuple[str, ...]
    about: str
    rl_stages: bool | None = None  # None: every stage; a policy loss and a cross-entropy do not share an axis
    log: bool = False  # a log axis is allowed
    quiet: float | None = None  # folded away where no value is further from 0 than this


PANELS = (
    PanelSpec("Reward", ("reward/mean", "reward"), "mean over a step’s valid rollouts"),
    PanelSpec("Success", ("agent/success",), "share of episodes solved, in training"),
    PanelSpec("Held-out", ("validation/",), "on tasks that are never trained on"),
    PanelSpec("Accuracy", ("accuracy/", "accuracy", "reward/perfect"), "share that is wholly right, on training tasks"),
    PanelSpec("Loss", ("loss",), "cross-entropy, nats a token", rl_stages=False, log=True),
    PanelSpec("Policy loss", ("loss",), "of the reinforcement-learning stages", rl_stages=True, quiet=1e-6),
    PanelSpec("KL", ("kl",), "to the reference model, nats a token", quiet=1e-6),
    PanelSpec("Entropy", ("entropy",), "nats a token"),
    PanelSpec("Clip fraction", ("clip_fraction",), "share of tokens at the clip", quiet=0.0),
    PanelSpec("Log-prob drift", ("logprob_drift/",), "sampler against trainer, nats", log=True, quiet=1e-3),
    PanelSpec("Tokens per second", ("time/tokens_per_s",), "throughput"),
)


@dataclass
class Band:
    """One stage's share of the x axis: `x` and `width` in SVG units, `low` and `high` in steps."""

    stage: str
    x: float
    width: float
    low: int
    high: int


@dataclass
class Part:
    """A series inside one band: thinned points and their SVG paths."""

    band: int
    steps: list[int]
    values: list[float]
    path: str = ""
    smooth: str = ""


@dataclass
class Series:
    """One line of a panel; the colour tells runs apart when there are several, metrics otherwise."""

    label: str
    color: int
    dash: int
    parts: list[Part] = field(default_factory=list)
    last: float = 0.0


@dataclass
class Panel:
    """One small chart."""

    title: str
    about: str
    bands: list[Band]
    series: list[Series]
    low: float
    high: float
    log: bool
    ticks: list[tuple[float, str]]
    label: str = ""


def short(value: float) -> str:
    """A number for a person: four significant digits, k and M for large ones."""
    size = abs(value)
    if size < 1e-15:  # the rounding of an interval's end
        return "0"
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if size and size < 1e-3:
        return f"{value:.3g}".replace("e-0", "e-")
    return f"{value:.4g}"


def thin(points: Points, limit: int) -> Points:
    """At most about `limit` points, keeping both ends and every bucket's smallest and largest value, so spikes
    survive.
    """
    if len(points) <= limit:
        return points
    buckets = max(1, limit // 2 - 1)
    inner = points[1:-1]
    kept = [points[0]]
    for index in range(buckets):
        bucket = inner[index * len(inner) // buckets : (index + 1) * len(inner) // buckets]
        if bucket:
            extremes = {min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])}
            kept.extend(sorted(extremes))
    return [*kept, points[-1]]


def moving_mean(points: Points, samples: int = 100) -> Points:
    """Centred moving mean over a twentieth of the series, at up to `samples` places."""
    half = max(1, len(points) // 40)
    total = [0.0]
    for _, value in points:
        total.append(total[-1] + value)
    places = sorted({round(index * (len(points) - 1) / (samples - 1)) for index in range(samples)})
    smooth = []
    for place in places:
        start, stop = max(0, place - half), min(len(points), place + half + 1)
        smooth.append((points[place][0], (total[stop] - total[start]) / (stop - start)))
    return smooth


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values between low and high."""
    rough = (high - low) / count
    unit = 10 ** math.floor(math.log10(rough))
    step = next((unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough), unit * 10)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def axis(values: Sequence[float], may_log: bool) -> tuple[float, float, bool, list[float]]:
    """(low, high, log, ticks) for a panel's values."""
    low, high = min(values), max(values)
    if may_log and low > 0 and high / low > LOG_FROM:
        low, high = 10 ** (math.log10(low) - 0.08), 10 ** (math.log10(high) + 0.08)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        tens = [10.0**power for power in powers if low <= 10.0**power <= high]
        ticks = (
            tens
            if len(tens) > 2
            else [
                factor * 10.0**power for power in powers for factor in (1, 2, 5) if low <= factor * 10.0**power <= high
            ]
        )
        return low, high, True, ticks[:: max(1, math.ceil(len(ticks) / 5))]
    if low == high:
        pad = abs(low) * 0.1 or 1.0
        return low - pad, high + pad, False, [low]
    if 0 < low < 0.5 * high:
        low = 0.0
    pad = 0.06 * (high - low)
    bounded = low >= 0 and high <= 1
    low = low - pad if low != 0 else 0.0
    high = min(1.0, high + pad) if bounded and high > 0.9 else high + pad
    return low, high, False, linear_ticks(low, high)


def y_of(panel: Panel, value: float) -> float:
    if panel.log:
        share = (math.log10(value) - math.log10(panel.low)) / (math.log10(panel.high) - math.log10(panel.low))
    else:
        share = (value - panel.low) / (panel.high - panel.low)
    return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)


def x_of(band: Band, step: int) -> float:
    share = (step - band.low) / (band.high - band.low) if band.high > band.low else 0.5
    return round(band.x + share * band.width, 1)


def path_of(panel: Panel, band: Band, points: Points) -> str:
    """SVG path through the points; a lone point becomes a short dash so that it is seen."""
    places = [f"{x_of(band, step):g} {y_of(panel, value):g}" for step, value in points]
    return f"M{places[0]}h2" if len(places) == 1 else "M" + "L".join(places)


def matches(name: str, wanted: str) -> bool:
    return name.startswith(wanted) if wanted.endswith("/") else name == wanted


def collect(run: RunData) -> dict[tuple[str, str], Points]:
    """Finite points of a run by (stage, metric), steps in order."""
    curves: dict[tuple[str, str], Points] = {}
    for record in run.metrics:
        for name, raw in record.items():
            value = number(raw)
            if name not in NOT_METRICS and value is not None and math.isfinite(value):
                curves.setdefault((record["stage"], name), []).append((record["step"], value))
    return curves


def make_panel(
    title: str, about: str, lines: list[tuple[str, int, int, dict[str, Points]]], limit: int, may_log: bool
) -> Panel:
    """Lays out one panel. Each line is (label, colour, dash, points by stage)."""
    stages = list(dict.fromkeys(stage for *_, by_stage in lines for stage in by_stage))
    room = (WIDTH - LEFT - RIGHT - STAGE_GAP * (len(stages) - 1)) / len(stages)
    bands = []
    for index, stage in enumerate(stages):
        steps = [step for *_, by_stage in lines for step, _ in by_stage.get(stage, [])]
        bands.append(Band(stage, round(LEFT + index * (room + STAGE_GAP), 1), round(room, 1), min(steps), max(steps)))
    values = [value for *_, by_stage in lines for points in by_stage.values() for _, value in points]
    low, high, log, ticks = axis(values, may_log)
    panel = Panel(title, about, bands, [], low, high, log, [])
    panel.ticks = [(y_of(panel, tick), short(tick)) for tick in ticks]
    for label, color, dash, by_stage in lines:
        entry = Series(label, color, dash)
        for index, band in enumerate(bands):
            points = by_stage.get(band.stage)
            if not points:
                continue
            kept = thin(points, limit)
            part = Part(
                index,
                [step for step, _ in kept],
                [float(f"{value:.5g}") for _, value in kept],
                path_of(panel, band, kept),
            )
            if len(points) >= SMOOTH_FROM:
                part.smooth = path_of(panel, band, moving_mean(points))
            entry.parts.append(part)
            entry.last = points[-1][1]
        panel.series.append(entry)
    first = panel.series[0].parts[0]
    panel.label = (
        f"{title}, {about}: {panel.series[0].label} goes from {short(first.values[0])} at {bands[first.band].stage} "
        f"step {first.steps[0]} to {short(panel.series[0].last)} at the end"
    )
    return panel


def build_panels(runs: list[RunData]) -> tuple[list[Panel], list[Panel]]:
    """The named panels that have something to say, and one panel for each remaining group of metrics, quiet ones
    first.
    """
    tables = [collect(run) for run in runs]
    names = list(dict.fromkeys(name for table in tables for _, name in table))
    rl_stages = {stage for table in tables for stage, name in table if name.startswith("reward")}
    limit = max(40, min(POINTS_A_SERIES, POINTS_IN_ALL // max(1, sum(len(table) for table in tables))))

    def lines_of(chosen: list[str], rl: bool | None) -> list[tuple[str, int, int, dict[str, Points]]]:
        lines = []
        for run_index, (run, table) in enumerate(zip(runs, tables, strict=True)):
            for index, name in enumerate(chosen):
                by_stage = {
                    stage: points
                    for (stage, metric), points in table.items()
                    if metric == name and (rl is None or (stage in rl_stages) == rl)
                }
                if by_stage:
                    several = len(runs) > 1
                    label = f"{run.name}: {name}" if several else name
                    lines.append((label, run_index if several else index, index if several else 0, by_stage))
        return lines

    def split(title: str, about: str, chosen: list[str], rl: bool | None = None, may_log: bool = True) -> list[Panel]:
        room = max(1, SERIES_A_PANEL // len(runs))
        groups = [chosen[start : start + room] for start in range(0, len(chosen), room)]
        laid = [(group, lines_of(group, rl)) for group in groups]
        return [
            make_panel(title if len(laid) == 1 else f"{title} {i}", about, lines, limit, may_log)
            for i, (_, lines) in enumerate(laid, 1)
            if lines
        ]

    main, quiet, used = [], [], set()
    for spec in PANELS:
        chosen = [name for name in names if any(matches(name, wanted) for wanted in spec.names)]
        used.update(chosen)
        if chosen:
            for panel in split(spec.title, spec.about, chosen, spec.rl_stages, spec.log):
                values = [abs(value) for line in panel.series for part in line.parts for value in part.values]
                (quiet if spec.quiet is not None and max(values) <= spec.quiet else main).append(panel)
    groups: dict[str, list[str]] = {}
    for name in names:
        if name not in used:
            # Seconds, counts and rates of one prefix rarely share a scale: only time/..._s are drawn together.
            key = "time, seconds" if name.startswith("time/") and name.endswith("_s") and "per_s" not in name else name
            groups.setdefault(key, []).append(name)
    return main, quiet + [panel for key, chosen in groups.items() for panel in split(key, "", chosen)]
