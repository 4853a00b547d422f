"""The report: one offline HTML file that shows what a run did, from whatever its run directory holds so far."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, StorageError
from ...core.files import make_folder, write_atomic
from ...core.progress import clock
from . import curves
from .clips import build_clips
from .curves import Panel, build_panels, short
from .frames import CELL, before_and_after
from .health import Finding, check_metrics, check_tables, series, worst_first
from .load import RunData, load_run, number
from .rollouts import build_rollouts
from .tables import build_tables, values_of

HERE = Path(__file__).parent
SIZE_LIMIT = 5_000_000
CONFIG_LIMIT = 200_000


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted keys; lists of plain values stay on one line."""
    if isinstance(value, dict) and value:
        return {
            key: text
            for name, inner in value.items()
            for key, text in flatten(inner, f"{prefix}.{name}" if prefix else str(name)).items()
        }
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        named = all(isinstance(item, dict) and item.get("name") for item in value)
        places = [f"{prefix}.{item['name']}" if named else f"{prefix}[{index}]" for index, item in enumerate(value)]
        return {
            key: text for place, inner in zip(places, value, strict=True) for key, text in flatten(inner, place).items()
        }
    return {prefix: "" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)}


def condense(proof: dict[str, Any]) -> dict[str, Any]:
    """An export's proof without the digests of its tensors, which only their number is shown of."""
    return {
        key: f"{len(value)} digests" if key == "tensors" and isinstance(value, dict) else value
        for key, value in proof.items()
    }


def differing_settings(runs: list[RunData]) -> list[tuple[str, list[str]]]:
    """Settings that are not the same in all runs, one column for each run."""
    flat = [flatten(run.config) for run in runs]
    keys = sorted({key for settings in flat for key in settings})
    rows = [(key, [settings.get(key, "–") for settings in flat]) for key in keys]
    return [row for row in rows if len(set(row[1])) > 1]


def edge_means(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Mean of the first and of the last tenth of a curve."""
    size = max(1, len(points) // 10)
    values = [value for _, value in points]
    return sum(values[:size]) / size, sum(values[-size:]) / size


def last_steps(run: RunData) -> dict[str, int]:
    """The last recorded step of each stage, in order."""
    return {record["stage"]: record["step"] for record in run.metrics}


def training_seconds(run: RunData) -> float:
    """Time spent in steps; a record stands for the steps since the one before, as not every step is recorded."""
    total, previous = 0.0, {}
    for record in run.metrics:
        took = number(record.get("time/step_s"))
        if took is not None and math.isfinite(took):
            total += took * (record["step"] - previous.get(record["stage"], 0))
        previous[record["stage"]] = record["step"]
    return total


def scores_in_words(table: dict[str, Any]) -> list[str]:
    """A table as sentences, one for each of its columns."""
    lines = []
    for index, column in enumerate(table["columns"]):
        cells = [(row["name"], values_of(row["cells"][index])) for row in table["rows"]]
        said = "; ".join(f"{name} {value_in_words(cell)}" for name, cell in cells)
        lines.append(f"{table['title']}, {column}: {said}.")
    return lines


def value_in_words(cell: dict[str, float | None]) -> str:
    """A value with its interval, where it has them."""
    value, low, high = cell["value"], cell["low"], cell["high"]
    if value is None:
        return "no valid result"
    return short(value) if low is None or high is None else f"{short(value)} ({short(low)} to {short(high)})"


def default_summary(run: RunData) -> tuple[str, list[str]]:
    """Plain words for a run that wrote no summary: what was recorded, and where the reward went."""
    stages = last_steps(run)
    if not stages and run.finished and run.results:
        return "Nothing was trained; the evaluations say:", [
            line for table in run.results for line in scores_in_words(table)
        ]
    if not stages:
        return "This run has not recorded a step yet.", []
    reached = ", ".join(f"{stage} up to step {step:,}" for stage, step in stages.items())
    paragraphs = [f"The run wrote no summary. Its record reaches: {reached}."]
    headline = f"{run.name}: finished" if run.finished else f"{run.name}: no final result yet"
    for stage in stages:
        points = series(run.metrics, stage, "reward/mean")
        if len(points) >= 2:
            first, last = edge_means(points)
            paragraphs.append(
                f"In {stage} the mean reward went from {short(first)} (first tenth of the steps) to {short(last)} "
                "(last tenth)."
            )
    return headline, paragraphs


def summary_of(run: RunData) -> tuple[str, list[str]]:
    headline, paragraphs = run.summary.get("headline"), run.summary.get("paragraphs")
    if not headline:
        return default_summary(run)
    return str(headline), [str(text) for text in paragraphs] if isinstance(paragraphs, list) else []


def facts_of(run: RunData) -> list[tuple[str, str]]:
    """The short line under a run's name: how much was done, on what."""
    facts = []
    if run.metrics:
        facts.append(("steps", ", ".join(f"{stage} {step:,}" for stage, step in last_steps(run).items())))
    spent = training_seconds(run)
    if spent:
        facts.append(("training time, about", clock(spent)))
    wanted = {
        "git.commit": "commit",
        "versions.torch": "torch",
        "versions.megatron-core": "megatron-core",
        "hardware.gpus": "GPUs",
        "hardware.cpus": "CPU cores",
    }
    for key, text in flatten(run.environment).items():
        label = wanted.get(key)
        if label and text:
            facts.append((label, text[:12] if label == "commit" else text[:60]))
    return facts


def findings_of(runs: list[RunData], invalid: Counter | None = None, rollouts_read: int = 0) -> list[Finding]:
    """Everything for the warnings section, worst first; with several runs each line names its run."""
    found = []
    for run in runs:
        own = check_metrics(run.metrics, run.samples, run.finished) + check_tables(run.results)
        own += [Finding("warning", problem) for problem in run.problems]
        proof = run.export_proof or {}
        difference, tolerance = number(proof.get("max_logit_difference")), number(proof.get("tolerance"))
        if difference is not None and tolerance is not None and not difference <= tolerance:
            own.append(
                Finding(
                    "error",
                    (
                        f"The exported model’s logits differ by {short(difference)}, more than the {short(tolerance)} "
                        "that is allowed"
                    ),
                )
            )
        if run.missing:
            own.append(Finding("note", "Not in the run directory: " + ", ".join(run.missing)))
        found += [Finding(item.level, f"{run.name} · {item.text}") for item in own] if len(runs) > 1 else own
    for reason, count in (invalid or Counter()).most_common():
        found.append(Finding("note", f"{count} of the {rollouts_read:,} saved rollouts read are invalid: {reason}"))
    return worst_first(found)


def hover_data(panels: list[Panel]) -> list[dict[str, Any]]:
    """What the script needs to read values off the curves; the drawing itself is already in the page."""
    return [
        {
            "bands": [asdict(band) for band in panel.bands],
            "low": panel.low,
            "high": panel.high,
            "log": panel.log,
            "series": [
                {
                    "last": short(line.last),
                    "parts": [{"band": part.band, "steps": part.steps, "values": part.values} for part in line.parts],
                }
                for line in panel.series
            ],
        }
        for panel in panels
    ]


def embed(data: Any) -> str:
    """JSON that may stand inside a script element whatever text it carries."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def digest(text: str) -> str:
    """What the page's content policy names, so that no other script or style can run in it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def render(runs: list[RunData]) -> str:
    """The whole page as text."""
    import jinja2

    records, rollouts_read, invalid = build_rollouts(runs)
    main, other = build_panels(runs)
    script, css = ((HERE / name).read_text(encoding="utf-8") for name in ("report.js", "report.css"))
    data = {
        "runs": [run.name for run in runs],
        "panels": hover_data(main + other),
        "plot": {"width": curves.WIDTH, "height": curves.HEIGHT, "top": curves.TOP, "bottom": curves.BOTTOM},
        "rollouts": records,
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        runs=runs,
        title=" and ".join(run.name for run in runs[:3]) + (f" and {len(runs) - 3} more" if len(runs) > 3 else ""),
        summaries=[(run, *summary_of(run), facts_of(run)) for run in runs],
        tables=build_tables(runs),
        sides=before_and_after(runs[0]) if len(runs) == 1 else [],
        cell=CELL,
        videos=build_clips(runs),
        main_panels=main,
        other_panels=other,
        plot=curves,
        findings=findings_of(runs, invalid, rollouts_read),
        rollouts_shown=len(records),
        rollouts_read=rollouts_read,
        rollout_files=sum(len(run.rollout_files) for run in runs),
        differing=differing_settings(runs) if len(runs) > 1 else [],
        environments=[flatten(run.environment) for run in runs],
        proofs=[(run.name, flatten(condense(run.export_proof))) for run in runs if run.export_proof],
        config_limit=CONFIG_LIMIT // len(runs),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        css=css,
        style_hash=digest(css),
        script=script,
        script_hash=digest(script),
        data=embed(data),
    )


def build_report(run_dir: str | Path | Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Writes the report of one run (by default into its directory) or of several compared; returns the file's path."""
    folders = [run_dir] if isinstance(run_dir, str | Path) else list(run_dir)
    if not folders:
        raise ConfigError("report: name at least one run directory")
    if out is None and len(folders) > 1:
        raise ConfigError("report: comparing several runs needs --out FILE")
    runs = [load_run(folder) for folder in folders]
    names = Counter(run.name for run in runs)
    for run in runs:
        if names[run.name] > 1:
            run.name = f"{run.path.resolve().parent.name}/{run.name}"
    target = Path(out) if out is not None else runs[0].path / "report.html"
    text = render(runs).encode("utf-8", "replace").decode()  # lone surrogates cannot be written to a file
    size = len(text.encode())
    if size > SIZE_LIMIT:
        raise StorageError(f"report: {size:,} bytes, over the limit of {SIZE_LIMIT:,}; compare fewer runs at once")
    make_folder(target.parent)
    write_atomic(target, text)
    return target
