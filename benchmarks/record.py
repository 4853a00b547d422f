"""The one file of record of every benchmark, `benchmarks/results.csv`: writing, reading, comparing, drawing.

A run_id is one boot of one machine and may span several commands; ratios are taken within one run_id only. A row whose
run_id starts with `baseline:` is a regression baseline.
"""

from __future__ import annotations

import csv
import datetime
import platform
import re
import shlex
import subprocess
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from xml.sax.saxutils import escape

RESULTS = Path(__file__).with_name("results.csv")
BASELINE = "baseline:"
LOWER_IS_BETTER = {"us", "ms", "s", "GiB", "GB", "MB", "bytes"}
# accuracies have promises of their own; parts of a whole are neither good nor bad
NO_JUDGEMENT = {"error", "nat", "part", "count", "cores"}


@dataclass(frozen=True)
class Row:
    run_id: str
    date: str
    commit: str
    gpu: str
    versions: str
    bench: str
    case: str
    impl: str
    metric: str
    value: float
    p20: float | None
    p80: float | None
    unit: str
    command: str


COLUMNS = [f.name for f in fields(Row)]


def boot_id() -> str:
    """One boot of one machine, short."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return (path.read_text().strip() if path.exists() else str(uuid.uuid4()))[:8]


def commit_id(root: Path | None = None) -> str:
    """The commit of the code that ran, `+` when the tree has changes, empty outside a repository."""
    root = root or Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20
        ).stdout.strip()

    try:
        commit = git("rev-parse", "--short", "HEAD")
        return commit + ("+" if commit and git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.TimeoutExpired):
        return ""


def command_line(start: str, words: list[str]) -> str:
    """The command of a row, as one would type it; where files lay on the machine is of no use to a reader."""
    shown = re.sub(r" --(out|logs|kernels) \S+", "", f"{start} {shlex.join(words)}".strip())
    return re.sub(r" (--\S+) /\S+", r" \1 FOLDER", shown)


class Recorder:
    """Collects rows of one command under the facts they share."""

    def __init__(
        self, bench: str, command: str, gpu: str, versions: str, commit: str | None = None, run_id: str | None = None
    ):
        now = datetime.datetime.now(datetime.timezone.utc)  # noqa: UP017  (datetime.UTC is the same object)
        self.shared = {
            "run_id": run_id or f"{now:%Y%m%d}-{boot_id()}",
            "date": f"{now:%Y-%m-%dT%H:%M:%SZ}",
            "commit": commit_id() if commit is None else commit,
            "gpu": gpu or platform.machine(),
            "versions": versions,
            "bench": bench,
            "command": command,
        }
        self.rows: list[Row] = []

    def add(
        self,
        case: str,
        impl: str,
        metric: str,
        value: float,
        unit: str,
        p20: float | None = None,
        p80: float | None = None,
    ) -> Row:
        row = Row(case=case, impl=impl, metric=metric, value=value, p20=p20, p80=p80, unit=unit, **self.shared)
        self.rows.append(row)
        return row


def append(rows: Iterable[Row], path: Path = RESULTS) -> None:
    """Add rows at the end; the header is written once."""
    new = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            writer.writerow(
                {k: "" if v is None else f"{v:.6g}" if isinstance(v, float) else v for k, v in asdict(row).items()}
            )


def read(path: Path = RESULTS) -> list[Row]:
    """Every row; a file with other columns is an error."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != COLUMNS:
            raise ValueError(f"{path}: columns are {reader.fieldnames}, expected {COLUMNS}")
        rows = []
        for line in reader:
            numbers = {k: float(line[k]) if line[k] else None for k in ("p20", "p80")}
            rows.append(Row(**(line | numbers | {"value": float(line["value"])})))
        return rows


def latest_run(rows: list[Row], bench: str) -> str:
    """The run_id of the newest row of a bench that is no baseline."""
    dated = [(r.date, r.run_id) for r in rows if r.bench == bench and not r.run_id.startswith(BASELINE)]
    if not dated:
        raise ValueError(f"no rows of bench {bench!r}")
    return max(dated)[1]


def compare(rows: list[Row], new: list[Row], tolerance: float = 0.10) -> list[str]:
    """What got worse than its baseline (same bench, case, impl, metric and GPU) by more than `tolerance`; our rows
    only.
    """
    base = {(r.bench, r.case, r.impl, r.metric, r.gpu): r.value for r in rows if r.run_id.startswith(BASELINE)}
    worse = []
    for row in new:
        key = (row.bench, row.case, row.impl, row.metric, row.gpu)
        if not row.impl.startswith("terrella") or key not in base or base[key] == 0 or row.unit in NO_JUDGEMENT:
            continue
        change = row.value / base[key] - 1
        if (change if row.unit in LOWER_IS_BETTER else -change) > tolerance:
            figure = f"{row.value:.4g} {row.unit}, baseline {base[key]:.4g} ({change:+.0%})"
            worse.append(f"{row.bench} | {row.case} | {row.impl} | {row.metric}: {figure}")
    return worse


def chart(rows: list[Row], bench: str, cases: list[tuple[str, str]], metric: str = "ms", title: str = "") -> str:
    """Horizontal bars (SVG) of one metric, a panel for every (case, caption), each from one run: of those that measured
    the most implementations the newest. Ours in colour."""
    latest_run(rows, bench)  # none at all is an error
    parts, y = [], 44
    for case, caption in cases:
        found = [r for r in rows if r.bench == bench and r.case == case and r.metric == metric]
        if not found:
            continue
        runs = [[r for r in found if r.run_id == run] for run in {r.run_id for r in found}]
        bars = sorted(
            max(runs, key=lambda run: (len({r.impl for r in run}), max(r.date for r in run))), key=lambda r: r.value
        )
        widest = max(r.value for r in bars)
        parts.append(f'<text x="16" y="{y}" class="c">{escape(caption)}</text>')
        y += 12
        for bar in bars:
            kind = "us" if bar.impl.startswith("terrella") else "floor" if bar.impl.startswith("matmul") else "them"
            width = max(2.0, 380 * bar.value / widest)
            parts.append(f'<text x="250" y="{y + 13}" class="n">{escape(bar.impl)}</text>')
            parts.append(f'<rect x="258" y="{y + 2}" width="{width:.1f}" height="14" rx="2" class="{kind}"/>')
            figure = f"{bar.value:,.0f}" if bar.value >= 1000 else f"{bar.value:.3g}"
            parts.append(f'<text x="{264 + width:.1f}" y="{y + 13}" class="v">{figure} {escape(bar.unit)}</text>')
            y += 20
        y += 26
    style = (
        "text{font:12px system-ui,sans-serif;fill:#555}.c{font-weight:600}.n{text-anchor:end}"
        ".t{font-size:15px;font-weight:700}"
        ".us{fill:#d9480f}.them{fill:#9aa5b1}.floor{fill:#cfd8dc}"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{y}" viewBox="0 0 760 {y}" '
        f'role="img"><style>{style}</style>'
    )
    return head + f'<text x="16" y="22" class="t">{escape(title)}</text>' + "".join(parts) + "</svg>\n"
