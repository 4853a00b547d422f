"""`terrella bench NAME`: the benchmarks of this project, each beside its rivals, recorded in one CSV and held against baselines."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..core.errors import ConfigError, TerrellaError

if TYPE_CHECKING:
    from ..benchmarks.record import Row

# name -> what it measures; the module of the same name under benchmarks/ does it
BENCHES = {
    "kernels": "every kernel beside its rivals and the machine's ceilings",
    "train": "training tokens/s, MFU and memory by model size",
    "rollout": "sampled tokens/s",
    "sync": "weights from the trainer to the samplers",
    "data": "shards read and packed",
    "worlds": "steps of the worlds",
    "e2e": "a whole RL recipe: tokens/s, and where the time goes",
}
SLOWER, LARGER = 0.10, 0.01  # what `--compare` lets pass: time, and memory
MEMORY_UNITS = ("GB", "MB")


def available() -> list[str]:
    """The benchmarks that this installation has."""
    return [name for name in BENCHES if importlib.util.find_spec(f"terrella.benchmarks.{name}")]


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]})
@click.argument("name", required=False)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.option("--out", type=click.Path(path_type=Path), help="CSV file to append to; default benchmarks/results.csv of the repository.")
@click.option("--compare", is_flag=True, help="Fail when a figure of ours is over 10 % slower or 1 % larger than its baseline row.")
@click.option("--baseline", is_flag=True, help="Keep our new figures as the baseline rows of this GPU.")
def bench(name: str | None, options: tuple[str, ...], out: Path | None, compare: bool, baseline: bool) -> None:
    """Run benchmark NAME; further OPTIONS are its own (try `terrella bench train -- --help`). Without NAME: list them."""
    from ..benchmarks import record

    if name is None:
        for known in available():
            click.echo(f"{known:8} {BENCHES[known]}")
        return
    if name not in available():
        raise ConfigError(f"'{name}' is no benchmark here; those are: {', '.join(available())}")
    path = out or record.RESULTS
    before = len(record.read(path))
    code = subprocess.call([sys.executable, "-m", f"terrella.benchmarks.{name}", "--out", str(path), *options])
    if code:
        error = TerrellaError(f"benchmark {name} ended with code {code}")
        error.exit_code = code if 0 < code < 126 else 1
        raise error
    rows = record.read(path)
    new = rows[before:]
    click.echo(f"{len(new)} rows appended to {path}")
    if compare:
        judge(rows[:before], new)
    if baseline:
        ours = [row for row in new if row.impl.startswith("terrella")]
        record.append([as_baseline(row) for row in ours], path)
        click.echo(f"{len(ours)} rows kept as baseline")


def judge(old: list[Row], new: list[Row]) -> None:
    """Raise when something got worse than its newest baseline."""
    from ..benchmarks import record

    known = {(r.bench, r.case, r.impl, r.metric, r.gpu) for r in old if r.run_id.startswith(record.BASELINE)}
    compared = [r for r in new if (r.bench, r.case, r.impl, r.metric, r.gpu) in known]
    if not compared:
        raise ConfigError("--compare: no baseline row of this GPU and these cases; keep one first with --baseline")
    memory = [r for r in compared if r.unit in MEMORY_UNITS]
    rest = [r for r in compared if r.unit not in MEMORY_UNITS]
    worse = record.compare(old, rest, SLOWER) + record.compare(old, memory, LARGER)
    if worse:
        raise TerrellaError(f"{len(worse)} of {len(compared)} figures are worse than their baseline:\n  " + "\n  ".join(worse))
    click.echo(f"{len(compared)} figures compared with their baselines; none is worse")


def as_baseline(row: Row) -> Row:
    """The row marked as what later runs are held against."""
    from dataclasses import replace

    from ..benchmarks import record

    return replace(row, run_id=f"{record.BASELINE}{row.run_id}")
