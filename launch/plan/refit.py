"""The time model held against, and fitted to, what `terrella bench cluster` measured on a cluster of one's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...benchmarks import record
from ...benchmarks.cluster import MODELS, Case, find_case
from ...core.errors import ConfigError
from .layout import Layout, Work
from .machine import GPUS, Constants, Gpu
from .published import RL_ROWS, ROWS, VERL_ROWS
from .rl import sync_seconds
from .timing import fitted, step_time

STEPS, NUDGE = 8, 1e-3  # of the fit
KEPT = 1e-4  # squared errors that moving a constant by a factor of e is worth
# what a cluster decides, in this order, one for every two rows and only where a row depends on it: everything between
# the kernels, the links' shares of their data sheets, the experts' part, the wait for numbers of tokens
REFITTED = ("own_slack", "network", "own_experts", "count_s", "nvlink")


NONE = (
    f"no row of `terrella bench cluster` on a GPU that is known ({', '.join(GPUS)}); on CPUs its counts mean "
    "something, its seconds do not"
)


@dataclass(frozen=True)
class Seen:
    """One case that was measured."""

    case: Case
    gpu: Gpu
    tokens_per_s: float  # per GPU
    values: dict[str, float]  # by metric

    @property
    def work(self) -> Work:
        return Work(MODELS[self.case.model], self.case.sequence, self.case.batch)

    @property
    def layout(self) -> Layout:
        c = self.case
        sizes = c.gpus, c.tensor, c.pipeline, c.virtual, c.context, c.expert, c.microbatch
        return Layout(*sizes, c.recompute)  # type: ignore[arg-type]

    def predicted(self, constants: Constants | None = None) -> float:
        return step_time(self.work, self.layout, self.gpu, constants).tokens_per_s

    def error(self, constants: Constants | None = None) -> float:
        return self.predicted(constants) / self.tokens_per_s - 1.0


def kind_of(name: str) -> Gpu | None:
    """The data sheet of a GPU by the name that its driver gives."""
    kinds = sorted(GPUS, key=len, reverse=True)  # gb200 before b200, h200 before h20
    return next((GPUS[kind] for kind in kinds if kind.upper() in name.upper()), None)


def read(path: Path) -> list[Seen]:
    """The newest row of each case on a GPU that the planner knows."""
    values: dict[tuple[str, str], dict[str, float]] = {}
    for row in record.read(path):
        if row.bench == "cluster" and not row.run_id.startswith(record.BASELINE):
            values.setdefault((row.case, row.gpu), {})[row.metric] = row.value
    found = []
    for (name, gpu), metrics in values.items():
        case, kind = find_case(name), kind_of(gpu)
        if case is not None and kind is not None and "tokens_per_s_gpu" in metrics:
            found.append(Seen(case, kind, metrics["tokens_per_s_gpu"], metrics))
    return found


def refit(seen: Sequence[Seen]) -> tuple[Constants, list[str]]:
    """The constants at their best on these rows, and which of them were fitted."""
    if not seen:
        raise ConfigError(f"--refit: {NONE}")
    start = fitted()
    names = [name for name in REFITTED if any(_matters(name, s, start) for s in seen)][: max(1, len(seen) // 2)]

    def off(logs: np.ndarray) -> np.ndarray:
        tried = replace(start, **{n: getattr(start, n) * math.exp(x) for n, x in zip(names, logs, strict=True)})
        return np.array([math.log(s.predicted(tried) / s.tokens_per_s) for s in seen])

    logs = np.zeros(len(names))
    for _ in range(STEPS):  # least squares of the errors' logarithms; what rows hardly decide stays where it was
        here = off(logs)
        slopes = np.stack([(off(logs + NUDGE * unit) - here) / NUDGE for unit in np.eye(len(names))], axis=1)
        square = slopes.T @ slopes + KEPT * np.eye(len(names))
        logs += np.clip(-np.linalg.solve(square, slopes.T @ here + KEPT * logs), -0.5, 0.5)
    return replace(start, **{n: getattr(start, n) * math.exp(x) for n, x in zip(names, logs, strict=True)}), names


def _matters(name: str, seen: Seen, constants: Constants) -> bool:
    changed = replace(constants, **{name: 2.0 * getattr(constants, name)})
    return abs(seen.predicted(changed) / seen.predicted(constants) - 1.0) > 0.01


def refit_table(seen: Sequence[Seen]) -> list[str]:
    """Measured beside predicted, before and after the fit, with each row by a fit without it."""
    if not seen:
        return [NONE]
    constants, names = refit(seen)
    lines = ["tokens/s/GPU: measured, predicted, error, error after the fit; sync: measured, predicted"]
    for s in seen:
        sync = sync_seconds(s.work.model, s.case.receivers, s.gpu, near=s.case.nodes == 1).seconds
        moved = f"; sync {s.values['sync']:.2f} s, {sync:.2f} s" if "sync" in s.values else ""
        lines.append(
            f"{s.case.name}: {s.tokens_per_s:,.0f}, {s.predicted():,.0f}, {100 * s.error():+.1f} %, "
            f"{100 * s.error(constants):+.1f} %{moved}"
        )
    before, after = (sum(abs(s.error(c)) for s in seen) / len(seen) for c in (None, constants))
    text = ", ".join(f"{name} {getattr(constants, name):.3g} (was {getattr(fitted(), name):.3g})" for name in names)
    lines.append(f"{len(names)} constants fitted on {len(seen)} rows: {text}")
    lines.append(f"mean absolute error: {100 * before:.1f} % before, {100 * after:.1f} % after")
    if len(seen) > 2:
        left = [abs(s.error(refit([t for t in seen if t is not s])[0])) for s in seen]
        lines[-1] += f", {100 * sum(left) / len(left):.1f} % for each row by a fit without it"
    return lines


def beside_published(path: Path) -> list[str]:
    """What others published of the models that were measured, or of all where they measured none of them; and whole
    steps of RL.
    """
    models = {case.model for row in record.read(path) if (case := find_case(row.case)) is not None}
    known = models & {p.model for p in ROWS} or {p.model for p in ROWS}
    lines = ["published, tokens/s/GPU in training:"]
    for p in ROWS:
        if p.model in known:
            where = f"{p.model} {p.precision}, {p.layout.gpus} x {p.gpu}, {p.layout.text()}"
            lines.append(f"  {where}: {p.tokens_per_s:,.0f}  ({p.source})")
    lines.append("published, seconds of a whole step of RL:")
    for r in RL_ROWS:
        where = f"{r.model}, {r.layout.gpus} x h100, {r.rollout.samples:,} samples"
        lines.append(f"  {where}: {r.seconds:.0f}  ({r.source})")
    for model, gpus, kind, step, sampling, training, source in VERL_ROWS:
        parts = f"{step:.0f}, of it sampling {sampling:.0f}, training {training:.0f}"
        lines.append(f"  {model}, {gpus} x {kind}: {parts}  ({source})")
    return lines
