"""`python -m terrella.benchmarks.arms RUN --bench spa`: the tables and speeds of finished runs become rows of the file
of record.

Every number of `results/*.json` is one row: the case is recipe, seed and table, the implementation the arm, the metric
the column. Scores are written as the table holds them (a share, a distance, a count), and `p20` and `p80` of a score
are the ends of its 95 % interval, as its unit says. Paired differences between arms come from the outcome of the
evaluation. Speeds come from `metrics.jsonl`, without each stage's first step, with their true 20th and 80th
percentiles; learning curves too (curves.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ..core.metrics import MetricsFile
from . import curves, record

SCORE, SCORE_WITH_INTERVAL = "score", "score, 95 % interval"
SPEEDS = {
    "time/tokens_per_s": ("tokens_per_s", "1/s"),
    "time/step_s": ("step", "s"),
    "time/rollout_s": ("rollout", "s"),
}


def read(path: Path) -> Any:
    """A file of the run, or a way out that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SystemExit(f"{path}: cannot be read ({error.strerror}); give the folder of a finished run") from error


def scores(run: Path) -> Iterator[tuple[str, str, str, float, float | None, float | None]]:
    """(table's title, arm, column, value, low, high) of every number in the run's tables. Tables that share a title,
    such as those of several temperatures, are told apart by the names of their files.
    """
    found = {path: read(path) for path in sorted((run / "results").glob("*.json"))}
    if not found:
        raise SystemExit(f"{run}/results: holds no table; the run has not reached its evaluation")
    titles = [table["title"] for table in found.values()]
    for path, table in found.items():
        title = table["title"] if titles.count(table["title"]) == 1 else f"{table['title']} ({path.stem})"
        for row in table["rows"]:
            for column, cell in zip(_named(table["columns"]), row["cells"], strict=True):
                cell = cell if isinstance(cell, dict) else {"value": cell}
                if isinstance(cell.get("value"), int | float):  # words stand where nothing could be measured
                    yield title, row["name"], column, float(cell["value"]), cell.get("low"), cell.get("high")


def _named(columns: list[str]) -> list[str]:
    """Columns that share a name are told apart by the one before them."""
    return [f"{columns[i - 1]}, {name}" if columns.count(name) > 1 and i else name for i, name in enumerate(columns)]


def speeds(run: Path) -> Iterator[tuple[str, str, list[float], str]]:
    """(stage, metric, values of its steps, unit); the first step warms up and is left out where there are others."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in MetricsFile(run / "metrics.jsonl").rows():
        for key in SPEEDS.keys() & row.keys():
            found.setdefault((row["stage"], key), []).append(float(row[key]))
    for (stage, key), values in sorted(found.items()):
        yield stage, SPEEDS[key][0], values[1:] or values, SPEEDS[key][1]


def outcomes(run: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(stage, what it ended with) of every finished stage."""
    for path in sorted((run / "stages").glob("*.json")):
        yield path.stem, read(path)


def arm_names(config: dict[str, Any]) -> dict[str, str]:
    """The name under which an evaluation shows each stage's model, where it gives one."""
    arms = [arm for stage in config["stages"] for arm in stage.get("arms") or () if isinstance(arm, dict)]
    return {arm["model"]: arm["name"] for arm in arms if arm.get("model") and arm.get("name")}


def rows_of(run: Path, bench: str, command: str, run_id: str | None = None) -> list[record.Row]:
    """All rows of one run, under the versions, commit and GPU that the run itself noted."""
    try:
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except OSError as error:
        raise SystemExit(f"{run}/config.yaml: cannot be read ({error.strerror}); {run} is no run directory") from error
    made = read(run / "environment.json")
    hardware, git = made["hardware"], made["git"]
    gpu = (
        ", ".join(sorted(set(hardware.get("gpus") or ()))) or f"none ({hardware['cpus']} cores, {hardware['machine']})"
    )
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    commit = (git["commit"] or "")[:7] + ("+" if git["commit"] and git["dirty"] else "")
    recorder = record.Recorder(bench, command, gpu, versions, commit=commit, run_id=run_id)
    whole, called = f"{config['name']} seed {config.get('seed', 0)}", arm_names(config)
    for title, arm, column, value, low, high in scores(run):
        unit = SCORE if low is None or high is None else SCORE_WITH_INTERVAL
        recorder.add(f"{whole}: {title}", arm, column, value, unit, low, high)
    for stage, metric, values, unit in speeds(run):
        cuts = statistics.quantiles(values, n=5) if len(values) > 1 else [None] * 4
        recorder.add(whole, called.get(stage, stage), metric, statistics.median(values), unit, cuts[0], cuts[3])
    for metric, stage, step, mean in curves.curves(run):
        recorder.add(f"{whole}{curves.MARK}{metric}", called.get(stage, stage), str(step), mean, SCORE)
    for stage, outcome in outcomes(run):
        if "time/stage_s" in outcome:
            recorder.add(whole, called.get(stage, stage), "stage", float(outcome["time/stage_s"]), "s")
        for name, cell in outcome.items():
            arms, _, metric = name.partition("/")
            if " minus " in arms and isinstance(cell, dict) and cell["value"] is not None:  # paired: in no table
                unit = SCORE if cell["low"] is None or cell["high"] is None else SCORE_WITH_INTERVAL
                recorder.add(whole, arms, metric, cell["value"], unit, cell["low"], cell["high"])
    return recorder.rows


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m terrella.benchmarks.arms", description="Record the arms of finished runs."
    )
    parser.add_argument("run", type=Path, nargs="+", help="folder of a finished run")
    parser.add_argument(
        "--bench", required=True, help="name of the benchmark in the file, e.g. spa, language, video, web"
    )
    parser.add_argument(
        "--run-id", help="where the runs were made on another machine: its id; default: today and this machine's boot"
    )
    parser.add_argument("--out", type=Path, default=record.RESULTS, help="CSV file to append to")
    given = parser.parse_args(words)
    for run in given.run:
        command = f"python -m terrella.benchmarks.arms {run.resolve().name} --bench {given.bench}"
        rows = rows_of(run, given.bench, command, given.run_id)
        record.append(rows, given.out)
        for row in rows:
            spread = "" if row.p20 is None else f"  ({row.p20:.4g} to {row.p80:.4g})"
            print(f"{row.case} | {row.impl} | {row.metric}: {row.value:.4g}{spread} {row.unit}")


if __name__ == "__main__":
    main()
