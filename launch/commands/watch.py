"""`terrella report RUN --live`: a running run in the terminal: stage, step, reward, speed, time left, health. It
only reads.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, DeadlineError
from ...core.files import read_json
from ...core.progress import clock
from ..report.curves import short
from ..report.health import Finding, check_metrics, series
from ..report.load import RunData, load_run, number

RECENT = 20  # records that the speed and the time left are judged by
SPARKS = "▁▂▃▄▅▆▇█"
SHOWN = (
    "reward/mean",
    "reward/perfect",
    "loss",
    "kl",
    "entropy",
    "clip_fraction",
    "logprob_drift/mean",
    "grad_norm",
    "lr",
    "invalid",
)


@dataclass
class StageView:
    """One stage's line: state is "done", "running" or "waiting"; `total` is None when the recipe leaves it open."""

    name: str
    state: str
    step: int = 0
    total: int | None = None
    left_s: float | None = None


@dataclass
class View:
    """Everything the terminal shows, computed from the run directory alone."""

    name: str
    stages: list[StageView]
    values: dict[str, float] = field(default_factory=dict)
    trend: list[float] = field(default_factory=list)
    trend_name: str = ""
    tokens_per_s: float | None = None
    mfu: float | None = None  # of the whole step, sampling included; where the GPUs are known
    queues: dict[str, int] = field(default_factory=dict)
    slow: list[str] = field(default_factory=list)
    silent_s: float | None = None
    findings: list[Finding] = field(default_factory=list)
    released: bool = False

    @property
    def finished(self) -> bool:
        return bool(self.stages) and all(stage.state == "done" for stage in self.stages)


def planned_stages(run: RunData) -> list[tuple[str, int | None]]:
    """(name, steps) of the recipe's stages in order, then of any stage that only the record knows."""
    stages = run.config.get("stages")
    planned = (
        [(str(s["name"]), s.get("steps")) for s in stages if isinstance(s, dict) and "name" in s]
        if isinstance(stages, list)
        else []
    )
    known = {name for name, _ in planned}
    return planned + [(name, None) for name in dict.fromkeys(r["stage"] for r in run.metrics) if name not in known]


def seconds_left(points: list[dict[str, Any]], step: int, total: int | None) -> float | None:
    """Median time of the recent steps times the steps that are left."""
    times = [t for record in points[-RECENT:] if (t := number(record.get("time/step_s"))) is not None]
    return statistics.median(times) * (total - step) if times and total is not None else None


def utilisation(run: RunData, tokens_per_s: float) -> float | None:
    """Share of the GPUs' bf16 peak that the tokens' forward and backward passes take; None on GPUs that the planner
    does not know.
    """
    from ...models.config import NamedModel
    from ...models.geometry import count
    from ..plan.machine import GPUS

    names = (run.environment.get("hardware") or {}).get("gpus") or [""]
    gpu = next((gpu for key, gpu in GPUS.items() if key.upper() in names[0]), None)
    if gpu is None or not isinstance(run.config.get("model"), dict):
        return None
    return (
        6.0
        * count(NamedModel(**run.config["model"])).active
        * tokens_per_s
        / (gpu.bf16 * int(run.config.get("ranks", 1)))
    )


def queue_depths(folder: Path) -> dict[str, int]:
    """Prompts given out and not yet trained on, and continuations of the newest weights, from a stage's journal."""
    from ...rl.journal import SAMPLES, Journal

    if not folder.is_dir():
        return {}
    counts = {"issued": 0, "trained": 0}
    for event in Journal(folder).events():
        if event["event"] in counts:
            counts[event["event"]] += len(event["prompts"])
    newest: dict[int, int] = {}
    for path in folder.glob("samples-*.jsonl"):
        if match := SAMPLES.fullmatch(path.name):
            newest[int(match[1])] = newest.get(int(match[1]), 0) + path.read_bytes().count(b"\n")
    return {
        "prompts open": counts["issued"] - counts["trained"],
        "continuations done": newest[max(newest)] if newest else 0,
    }


def slow_ranks(folder: Path) -> list[str]:
    """Ranks that the run itself found to hold the others up, in words."""
    from ..stragglers import SLOW, Slow

    return [Slow(**slow).text() for slow in (read_json(folder / SLOW) or {"ranks": []})["ranks"]]


def look(folder: Path, now: float | None = None) -> View:
    """The state of a run, from its files."""
    run = load_run(folder)
    stages = []
    for name, total in planned_stages(run):
        records = [record for record in run.metrics if record["stage"] == name]
        outcome = read_json(folder / "stages" / f"{name}.json")
        step = records[-1]["step"] if records else 0
        if outcome is not None:
            stages.append(StageView(name, "done", step, total or outcome.get("steps")))
        else:
            stages.append(
                StageView(name, "running" if records else "waiting", step, total, seconds_left(records, step, total))
            )
    lease = read_json(folder / "lease.json") or {}
    findings = check_metrics(run.metrics, run.samples, run.finished)
    view = View(run.name, stages, findings=findings, released=bool(lease.get("released")))
    # The record is in the recipe's order, so its last stage is the one at work.
    current = next(
        (name for name in reversed([s.name for s in stages]) if any(r["stage"] == name for r in run.metrics)), None
    )
    if current is not None:
        records = [record for record in run.metrics if record["stage"] == current]
        for name in SHOWN:
            points = series(records, current, name)
            if points:
                view.values[name] = points[-1][1]
        view.trend_name = "reward/mean" if "reward/mean" in view.values else "loss"
        view.trend = [value for _, value in series(records, current, view.trend_name)]
        speeds = [value for _, value in series(records[-RECENT:], current, "time/tokens_per_s")]
        view.tokens_per_s = statistics.median(speeds) if speeds else None
        view.mfu = utilisation(run, view.tokens_per_s) if view.tokens_per_s else None
        if read_json(folder / "stages" / f"{current}.json") is None:
            view.queues = queue_depths(folder / "stages" / current / "journal")
            view.slow = slow_ranks(folder)
    if not view.finished and (folder / "metrics.jsonl").exists():
        view.silent_s = max(0.0, (time.time() if now is None else now) - (folder / "metrics.jsonl").stat().st_mtime)
    return view


def sparkline(values: list[float], width: int = 40) -> str:
    """The curve in one line of block characters, each the mean of its share of the steps."""
    if not values:
        return ""
    count = min(width, len(values))
    shares = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(share) / len(share) for share in shares]
    low, high = min(means), max(means)
    return "".join(
        SPARKS[int((value - low) / (high - low) * (len(SPARKS) - 1))] if high > low else SPARKS[0] for value in means
    )


def status(view: View) -> str:
    """One line of plain words on how the run stands."""
    if view.finished:
        return "finished"
    if view.released:
        return "stopped; run the same train command to go on"
    return f"last record {clock(view.silent_s)} ago" if view.silent_s is not None else "no step recorded yet"


def render(view: View) -> Any:
    """The view as a rich renderable. Text from the run is wrapped in Text, so no name can be taken for markup."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    stages = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("stage", "", "step", "time left"):
        stages.add_column(column, justify="right" if column in ("step", "time left") else "left")
    for stage in view.stages:
        total = f" / {stage.total}" if stage.total else ""
        share = stage.step / stage.total if stage.total else 0.0
        filled = 20 if stage.state == "done" else round(20 * share)
        color = {"done": "green", "running": "cyan", "waiting": "dim"}[stage.state]
        bar = Text("━" * filled, style=color) + Text("━" * (20 - filled), style="bright_black")
        left = (
            clock(stage.left_s)
            if stage.state == "running" and stage.left_s is not None
            else "done"
            if stage.state == "done"
            else ""
        )
        stages.add_row(
            Text(stage.name, style="bold" if stage.state == "running" else color),
            bar,
            Text(f"{stage.step}{total}" if stage.step else ""),
            Text(left),
        )

    numbers = Table(box=None, pad_edge=False, show_header=False)
    numbers.add_column(style="dim")
    numbers.add_column(justify="right")
    for name, value in view.values.items():
        numbers.add_row(Text(name), Text(short(value)))
    if view.tokens_per_s is not None:
        numbers.add_row(Text("tokens/s"), Text(short(view.tokens_per_s)))
    if view.mfu is not None:
        numbers.add_row(Text("MFU"), Text(f"{100 * view.mfu:.1f} %"))
    for name, depth in view.queues.items():
        numbers.add_row(Text(name), Text(str(depth)))

    loud = [finding for finding in view.findings if finding.level != "note"]
    health = Text("healthy: no alarm in the record", style="green")
    if loud:
        health = Text("\n").join(
            Text(f"{f.level}: {f.text}", style="red" if f.level == "error" else "yellow") for f in loud[:5]
        )
    if view.slow:
        health = Text("\n").join(
            [*([health] if loud else []), *(Text(f"slow: {text}", style="yellow") for text in view.slow)]
        )
    parts = [stages, Text(""), numbers]
    if len(view.trend) > 1:
        parts += [Text(""), Text.assemble((f"{view.trend_name}  ", "dim"), (sparkline(view.trend), "cyan"))]
    return Panel(
        Group(*parts, Text(""), health),
        title=Text(view.name, style="bold"),
        subtitle=Text(status(view)),
        title_align="left",
        subtitle_align="left",
    )


def watch(run: Path, once: bool, every: float, give_up: float) -> None:
    """Follow a run in the terminal until it finishes or Ctrl-C is pressed. Watching never disturbs the run."""
    from rich.console import Console
    from rich.live import Live

    if not run.is_dir():
        raise ConfigError(f"{run}: no such run directory")
    console = Console()
    if once or not console.is_terminal:
        console.print(render(look(run)))
        return
    try:
        with Live(render(look(run)), console=console, screen=False, refresh_per_second=4) as live:
            while True:
                start = time.monotonic()
                view = look(run)
                live.update(render(view))
                if view.finished or view.released:
                    return
                if view.silent_s is not None and view.silent_s > give_up:
                    raise DeadlineError(
                        f"{run}: no new record for {clock(view.silent_s)} (--give-up {give_up:g}); see {run / 'logs'}"
                    )
                time.sleep(max(every, 4 * (time.monotonic() - start)))  # a long record must not keep a core busy
    except KeyboardInterrupt:
        return
