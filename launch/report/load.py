"""Reads a run directory for people to look at: tolerant of missing and half-written parts, and never silent about
them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ...core.errors import ConfigError

NON_FINITE = ("nan", "inf", "-inf")  # how the record writes what JSON cannot


@dataclass
class RolloutFile:
    """One `rollouts/<stage>-<step>.jsonl`; `records` stays empty until the file was chosen to be shown."""

    path: Path
    stage: str
    step: int
    total: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)
    invalid: Counter = field(default_factory=Counter)


@dataclass
class RunData:
    """All that a report or a terminal view needs of one run."""

    path: Path
    name: str
    config_text: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    rollout_files: list[RolloutFile] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    export_proof: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether every stage of its recipe has left an outcome."""
        stages = self.config.get("stages")
        names = [s.get("name") for s in stages if isinstance(s, dict)] if isinstance(stages, list) else []
        return bool(names) and all((self.path / "stages" / f"{name}.json").is_file() for name in names)

    @property
    def samples(self) -> dict[str, int]:
        """The samples of one step, by RL stage."""
        stages, found = self.config.get("stages"), {}
        for stage in [s for s in stages if isinstance(s, dict)] if isinstance(stages, list) else []:
            prompts, each = stage.get("prompts_per_step"), stage.get("samples_per_prompt")
            if isinstance(prompts, int) and isinstance(each, int) and prompts * each > 0:
                found[str(stage.get("name"))] = prompts * each
        return found


def number(value: Any) -> float | None:
    """A metric's value as a float, or None when it is not a number (booleans are not metrics, "nan" and "inf" are)."""
    if value in NON_FINITE:
        return float(value)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def json_lines(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Objects of a JSON-lines file. A torn last line is normal in a running run; any other bad line is reported."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for index, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:
                if line.endswith("\n"):
                    problems.append(f"{path.parent.name}/{path.name}, line {index}: not JSON, left out")
                continue
            if isinstance(record, dict):
                yield record
            else:
                problems.append(f"{path.parent.name}/{path.name}, line {index}: not an object, left out")


def read_json(path: Path, problems: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError as error:
        problems.append(f"{path.name}: not JSON ({error})")
        return None
    if not isinstance(value, dict):
        problems.append(f"{path.name}: an object was expected, found {type(value).__name__}")
        return None
    return value


def read_metrics(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Records in order of stage and step; a step written twice (a resumed run) keeps its last record."""
    latest: dict[tuple[str, int], dict[str, Any]] = {}
    order: list[str] = []
    dropped = 0
    for record in json_lines(path, problems):
        step = number(record.get("step"))
        if step is None or not math.isfinite(step):
            dropped += 1
            continue
        stage = str(record.get("stage", "train"))
        if stage not in order:
            order.append(stage)
        # An evaluation may add a second record for a step: later keys win, earlier ones stay.
        latest.setdefault((stage, int(step)), {}).update(record, stage=stage, step=int(step))
    if dropped:
        problems.append(f"metrics.jsonl: {dropped} records without a step, left out")
    rank = {stage: index for index, stage in enumerate(order)}
    return [latest[key] for key in sorted(latest, key=lambda key: (rank[key[0]], key[1]))]


def list_rollouts(folder: Path, problems: list[str]) -> list[RolloutFile]:
    """The rollout files of a run in order of stage and step, not yet read."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        stage, _, step = path.stem.rpartition("-")
        if not stage or not step.isdigit():
            problems.append(f"rollouts/{path.name}: the name is not <stage>-<step>.jsonl, left out")
            continue
        found.append(RolloutFile(path, stage, int(step)))
    return sorted(found, key=lambda file: (file.stage, file.step))


def read_table(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """One evaluation table, or None with the reason among the problems when its shape is wrong."""
    table = read_json(path, problems)
    if table is None:
        return None
    rows = table.get("rows")
    columns = table.get("columns")
    if not isinstance(rows, list) or not isinstance(columns, list):
        return None  # other JSON a run may keep under results/ is not a table
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("cells"), list) or len(row["cells"]) != len(columns):
            problems.append(f"results/{path.name}: a row does not have one cell for each of the {len(columns)} columns")
            return None
    return {
        "file": path.name,
        "title": str(table.get("title", path.stem)),
        "columns": [str(c) for c in columns],
        "rows": rows,
        "note": table.get("note"),
        "unit": table.get("unit"),  # of its numbers, where they are no shares
        "invalid": table.get("invalid"),  # how many results were, and why
        "known": number(table.get("known")),  # tasks that are among those to train on
        "facts": table.get("facts") is True,  # numbers about the models that are no scores
        "lower": [str(c) for c in table.get("lower") or []],  # columns in which less is better
    }


def load_run(run_dir: str | Path) -> RunData:
    """Reads everything but the rollouts' lines. Raises ConfigError when the folder is no run directory."""
    path = Path(run_dir)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such run directory")
    if not any((path / name).exists() for name in ("config.yaml", "metrics.jsonl", "environment.json", "results")):
        raise ConfigError(
            f"{path}: not a run directory (it has no config.yaml, metrics.jsonl, environment.json or results/)"
        )
    run = RunData(path, path.resolve().name)

    config = path / "config.yaml"
    if config.is_file():
        run.config_text = config.read_text(encoding="utf-8", errors="replace")
        try:
            parsed = yaml.safe_load(run.config_text)
        except yaml.YAMLError as error:
            run.problems.append(f"config.yaml: not YAML ({str(error).splitlines()[0]})")
        else:
            run.config = parsed if isinstance(parsed, dict) else {}
    else:
        run.missing.append("config.yaml")

    for name in ("environment.json", "summary.json"):
        value = read_json(path / name, run.problems)
        if value is None and name == "environment.json":
            run.missing.append(name)
        setattr(run, name.removesuffix(".json"), value or {})
    run.export_proof = read_json(path / "export" / "export_proof.json", run.problems)

    if (path / "metrics.jsonl").is_file():
        run.metrics = read_metrics(path / "metrics.jsonl", run.problems)
    if not run.metrics:
        run.missing.append("metrics.jsonl (no step was recorded)")

    order = list(dict.fromkeys(record["stage"] for record in run.metrics))
    files = list_rollouts(path / "rollouts", run.problems)
    run.rollout_files = sorted(files, key=lambda file: order.index(file.stage) if file.stage in order else len(order))
    if not run.rollout_files:
        run.missing.append("rollouts/")

    tables = [read_table(file, run.problems) for file in sorted((path / "results").glob("*.json"))]
    run.results = [table for table in tables if table]
    if not run.results:
        run.missing.append("results/ (no evaluation table)")
    return run


def read_rollouts(file: RolloutFile) -> list[str]:
    """Reads one rollout file's lines into it; returns what was wrong with them."""
    problems: list[str] = []
    for record in json_lines(file.path, problems):
        file.total += 1
        file.records.append(record)
        if record.get("invalid"):
            file.invalid[str(record["invalid"])] += 1
    return problems
