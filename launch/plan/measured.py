"""Training steps of models with experts that this project has measured on an H200, as `terrella bench train`
recorded them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .layout import Layout, Work

# constant of the time model -> the implementations that decide it, the first that was measured
DECIDED_BY = {"experts": ("megatron-core TE",), "own_experts": ("terrella", "terrella TE")}


@dataclass(frozen=True)
class Measured:
    """One step on one H200, and the constant that it decides."""

    constant: str
    impl: str
    case: str
    work: Work
    layout: Layout
    seconds: float


def expert_steps(path: Path | None = None) -> list[Measured]:
    """The newest step for each constant that has one; none where the record holds no model with experts, or is not
    installed.
    """
    from ...benchmarks import record
    from ...benchmarks.train import find_case

    newest: dict[str, record.Row] = {}
    for row in record.read(path or record.RESULTS):
        if (
            row.bench == "train"
            and row.metric == "tokens_per_s"
            and "H200" in row.gpu
            and not row.run_id.startswith(record.BASELINE)
        ):
            try:
                experts = find_case(row.case)[0].experts
            except ValueError:  # a case of another time
                continue
            if experts and (row.impl not in newest or row.date >= newest[row.impl].date):
                newest[row.impl] = row
    found = []
    for constant, impls in DECIDED_BY.items():
        row = next((newest[impl] for impl in impls if impl in newest), None)
        if row is not None:
            model, lengths = find_case(row.case)
            work = Work(model, sequence=max(lengths), batch=len(lengths), own=constant.startswith("own"))
            found.append(
                Measured(
                    constant, row.impl, row.case, work, Layout(1, microbatch=len(lengths)), sum(lengths) / row.value
                )
            )
    return found
