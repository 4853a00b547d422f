"""The planner and the engine agree: what it calls best runs, what it calls impossible is refused."""

from __future__ import annotations

from dataclasses import replace

from terrella.core.errors import ConfigError
from terrella.core.mcore.setup import stop_parallel
from terrella.core.schema import to_plain
from terrella.launch.plan.layout import Layout, Work, impossible
from terrella.launch.plan.machine import GPUS
from terrella.launch.plan.search import search
from terrella.tests.parallel.jobs import DENSE, make_engine
from terrella.tests.parallel.pool import run_ranks

WORK = Work(DENSE, sequence=64, batch=16)
IMPOSSIBLE = [
    (Layout(2, pipeline=2, virtual=4), DENSE, "does not divide the 4 layers"),
    (Layout(2, expert=2), DENSE, "no experts"),
    (Layout(2, tensor=2), replace(DENSE, heads=3, kv_heads=1), "heads (3)"),
    (Layout(2, tensor=2), replace(DENSE, heads=6, kv_heads=3), "kv_heads (3)"),
]


def refusals() -> list[str]:
    """What the engine says to each impossible layout; runs on every rank."""
    said = []
    for layout, model, _ in IMPOSSIBLE:
        try:
            make_engine(to_plain(layout.settings()), model)
            said.append("it runs")
        except ConfigError as error:
            said.append(str(error))
        stop_parallel()
    return said


def test_the_best_cut_layout_runs() -> None:
    layout = next(c.layout for c in search(WORK, 2, GPUS["h100"]).fitting if c.layout.tensor * c.layout.pipeline == 2)
    parallel = to_plain(layout.settings())
    result = run_ranks("terrella.tests.parallel.jobs:measure", 2, parallel=parallel, packed=True, kind="dense")[0]
    assert result["metrics"]["tokens"] > 0


def test_what_is_called_impossible_is_refused() -> None:
    said = run_ranks("terrella.tests.parallel.test_plan:refusals", 2)[0]
    for (layout, model, reason), engine in zip(IMPOSSIBLE, said, strict=True):
        assert reason in (impossible(layout, replace(WORK, model=model)) or "") and reason in engine
