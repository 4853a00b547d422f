"""`terrella bench NAME`: the benchmarks of this project, each beside its rivals, recorded in one CSV and held
against baselines.
"""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...core.errors import ConfigError, TerrellaError
from ...core.files import make_folder, write_atomic

if TYPE_CHECKING:
    from ...benchmarks.record import Row

# name -> what it measures; the module of the same name under benchmarks/ does it
BENCHES = {
    "kernels": "every kernel beside its rivals and the machine's ceilings",
    "train": "training tokens/s, MFU and memory by model size",
    "parity": "whether training in fp8 learns as training in bf16 does",
    "rollout": "sampled tokens/s",
    "ragged": "sampled tokens/s of answers with long tails and of episodes with many turns",
    "copying": "sampled tokens/s of trained world models, plain and with copied proposals",
    "ahead": "trajectories an hour in a slow world, by how far rollouts are ahead of training",
    "episodes": "web episodes an hour, each for itself and in lock-step",
    "sync": "weights from the trainer to the samplers",
    "moves": "bytes that ranks move, and seconds, at start, save, load and sync",
    "cluster": "one layout on many GPUs: training, sampling and weight sync; `terrella plan --refit` reads it",
    "data": "shards read and packed",
    "worlds": "steps of the worlds",
    "e2e": "a whole RL recipe: tokens/s, and where the time goes",
    "video": "picture metrics, decoding and the reward of imagined clips",
}
# file -> what is drawn of a benchmark (its run: record.chart): bench, metric, title, and (case, caption) where not
# every case is wanted
CHARTS = {
    "kernels.svg": (
        "kernels",
        "ms",
        "Terrella kernels beside the public ones",
        (
            (
                "linear_policy_loss f+b N=16384 V=151936 H=4096",
                "Hidden states to loss and gradients, 16,384 tokens, vocabulary 151,936, hidden 4,096 (H200)",
            ),
            ("token_logprob f+b N=16384 V=151936", "Logits to log-probs and gradients, 16,384 x 151,936"),
        ),
    ),
    "train.svg": ("train", "tokens_per_s", "Training throughput: longer is better", ()),
    "rollout.svg": ("rollout", "speed", "Sampling throughput: longer is better", ()),
    "sync.svg": ("sync", "seconds", "Weights from trainer to sampler: shorter is better", ()),
    "e2e.svg": ("e2e", "tokens_per_s", "A whole RL step: longer is better", ()),
}
CURVES = {"spa.svg": ("spa", "agent/success", "Sokoban: episodes solved in training, by arm; a line is a seed")}
SLOWER, LARGER = 0.10, 0.01  # what `--compare` lets pass: time, and memory
MEMORY_UNITS = ("GiB", "GB", "MB")


def available() -> list[str]:
    """The benchmarks that this installation has."""
    return [name for name in BENCHES if importlib.util.find_spec(f"terrella.benchmarks.{name}")]


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]})
@click.argument("name", required=False)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="CSV file to append to; default benchmarks/results.csv of the repository.",
)
@click.option(
    "--compare",
    is_flag=True,
    help="Fail when a figure of ours is over 10 % slower or 1 % larger than its baseline row.",
)
@click.option(
    "--charts",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Draw the record's newest figures there and stop.",
)
@click.option("--baseline", is_flag=True, help="Keep our new figures as the baseline rows of this GPU.")
def bench(
    name: str | None, options: tuple[str, ...], out: Path | None, compare: bool, charts: Path | None, baseline: bool
) -> None:
    """Run benchmark NAME; further OPTIONS are its own (try `terrella bench train -- --help`). Without NAME: list
    them.
    """
    from ...benchmarks import record

    if charts:
        for drawn in draw(record.read(out or record.RESULTS), charts):
            click.echo(drawn)
        return
    if name is None:
        for known in available():
            click.echo(f"{known:8} {BENCHES[known]}")
        return
    if name not in available():
        raise ConfigError(f"'{name}' is no benchmark here; those are: {', '.join(available())}")
    path = out or record.RESULTS
    before = len(record.read(path))
    code = run([sys.executable, "-m", f"terrella.benchmarks.{name}", "--out", str(path), *options])
    rows = record.read(path)
    new = rows[before:]
    click.echo(f"{len(new)} rows appended to {path}")
    if name == "cluster" and new:
        from ..plan.refit import beside_published, read, refit_table

        click.echo("\n".join([*refit_table(read(path)), *beside_published(path)]))
    if compare and not code:
        judge(rows[:before], new)
    if baseline:  # also of a benchmark that was cut short: what it measured stands
        ours = [row for row in new if row.impl.startswith("terrella")]
        record.append([as_baseline(row) for row in ours], path)
        click.echo(f"{len(ours)} rows kept as baseline")
    if code:
        error = TerrellaError(f"benchmark {name} ended with code {code}")
        error.exit_code = code if 0 < code < 126 else 1
        raise error


def run(command: list[str]) -> int:
    """The exit code of a command. A request to end is passed on, so that what was measured until then is still
    judged and kept.
    """
    with subprocess.Popen(command) as process:
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            return process.wait()
        finally:
            signal.signal(signal.SIGTERM, before)


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """Every chart that the record has figures for. Each shows one run on one machine, a GPU where there is one."""
    from ...benchmarks import curves, record

    written = []
    for file, (bench, metric, title) in CURVES.items():
        if curves.lines_of(rows, bench, metric):
            written.append(make_folder(folder) / file)
            write_atomic(written[-1], curves.chart(rows, bench, metric, title))
    for file, (bench, metric, title, wanted) in CHARTS.items():
        found = [
            r for r in rows if r.bench == bench and r.metric == metric and not r.run_id.startswith(record.BASELINE)
        ]
        on_gpu = [r for r in found if "NVIDIA" in r.gpu]
        cases = wanted or tuple((case, f"{case} ({r.gpu})") for case, r in {r.case: r for r in on_gpu or found}.items())
        shown = [r for r in on_gpu or found if r.case in {case for case, _ in cases}]
        if shown:
            path = make_folder(folder) / file
            write_atomic(path, record.chart(shown, bench, list(cases), metric, title))
            written.append(path)
    return written


def judge(old: list[Row], new: list[Row]) -> None:
    """Raise when something got worse than its newest baseline."""
    from ...benchmarks import record

    known = {(r.bench, r.case, r.impl, r.metric, r.gpu) for r in old if r.run_id.startswith(record.BASELINE)}
    compared = [r for r in new if (r.bench, r.case, r.impl, r.metric, r.gpu) in known]
    if not compared:
        raise ConfigError("--compare: no baseline row of this GPU and these cases; keep one first with --baseline")
    memory = [r for r in compared if r.unit in MEMORY_UNITS]
    rest = [r for r in compared if r.unit not in MEMORY_UNITS]
    worse = record.compare(old, rest, SLOWER) + record.compare(old, memory, LARGER)
    if worse:
        raise TerrellaError(
            f"{len(worse)} of {len(compared)} figures are worse than their baseline:\n  " + "\n  ".join(worse)
        )
    click.echo(f"{len(compared)} figures compared with their baselines; none is worse")


def as_baseline(row: Row) -> Row:
    """The row marked as what later runs are held against."""
    from dataclasses import replace

    from ...benchmarks import record

    return replace(row, run_id=f"{record.BASELINE}{row.run_id}")
