"""Sinks mirror the record and its tables, into the real packages where they are installed; a missing package is
named.
"""

import importlib.util
import json
from pathlib import Path

import pytest

from terrella.core.errors import ConfigError
from terrella.core.metrics import MetricsFile
from terrella.core.run import Run
from terrella.core.sinks import open_sinks, wandb_id

ROLLOUTS = [
    {
        "prompt_id": 7,
        "sample": 1,
        "reward": 0.5,
        "invalid": None,
        "turns": [{"context": "1|\n2<", "answer": "a"}, {"prompt": "b", "action": "up"}],
    }
]
RESULT = {
    "columns": ["greedy"],
    "rows": [
        {"name": "empty answer", "kind": "baseline", "cells": [{"value": 0.25, "low": 0.1, "high": 0.4, "n": 20}]}
    ],
}


class Memory:
    def __init__(self) -> None:
        self.rows: list[tuple] = []
        self.tables: dict[tuple[str, int], list[list]] = {}

    def write(self, stage, step, values) -> None:
        self.rows.append((stage, step, dict(values)))

    def show(self, name, step, table) -> None:
        self.tables[name, step] = table.rows

    def close(self) -> None:
        pass


def keep_all(folder: Path, sink) -> None:
    """A row, a step's rollouts and an evaluation, as stages write them."""
    for name in ("logs", "rollouts", "results"):
        (folder / name).mkdir(exist_ok=True)
    run = Held(folder, "", (sink,))
    run.metrics.append("rl", 3, {"loss": 0.5})
    run.write_rollouts("rl", 3, ROLLOUTS)
    run.write_result("evaluate", RESULT)
    sink.close()


class Held(Run):
    def guard(self) -> None:
        """No other process could own this folder."""


def test_a_sink_gets_a_copy_of_every_row(tmp_path) -> None:
    memory = Memory()
    metrics = MetricsFile(tmp_path / "metrics.jsonl", sinks=[memory])
    metrics.append("a", 1, {"loss": 0.5})
    assert memory.rows == [("a", 1, {"loss": 0.5})] and len(list(metrics.rows())) == 1


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named(name: str, tmp_path) -> None:
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed here")
    with pytest.raises(ConfigError, match=f"sinks: '{name}' needs a package that is not installed"):
        open_sinks([name], tmp_path, "run")


def test_tables_of_rollouts_and_results_go_to_every_sink(tmp_path: Path) -> None:
    memory = Memory()
    keep_all(tmp_path, memory)
    assert memory.tables == {
        ("rollouts/rl", 3): [[7, 1, 1, "1|\n2<", "a", 0.5, None], [7, 1, 2, "b", "up", 0.5, None]],
        ("results/evaluate", 0): [["empty answer", "baseline", "greedy", 0.25, 0.1, 0.4, 20]],
    }


def test_tensorboard_shows_them(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "logs").mkdir()
    (sink,) = open_sinks(["tensorboard"], tmp_path, "run")
    keep_all(tmp_path, sink)
    events = EventAccumulator(str(tmp_path / "logs" / "tensorboard"), {"tensors": 0}).Reload()
    assert [(e.step, e.value) for e in events.Scalars("rl/loss")] == [(3, 0.5)]
    (shown,), (result,) = events.Tensors("rollouts/rl/text_summary"), events.Tensors("results/evaluate/text_summary")
    assert (
        shown.step == 3 and "| 7 | 1 | 1 | 1&#124;<br>2&lt; | a | 0.5 |  |" in shown.tensor_proto.string_val[0].decode()
    )
    assert "| empty answer | baseline | greedy | 0.25 | 0.1 | 0.4 | 20 |" in result.tensor_proto.string_val[0].decode()


def test_weights_and_biases_knows_runs_apart_whose_folders_are_called_alike(tmp_path: Path) -> None:
    first, second, earlier = (tmp_path / user / "sokoban" for user in "abc")
    for folder in (first, second, earlier):
        (folder / "logs").mkdir(parents=True)
    (earlier / "logs" / "wandb").mkdir()
    ids = [wandb_id(folder) for folder in (first, second, earlier)]
    assert [name.partition("-")[0] for name in ids] == ["sokoban"] * 3 and len(set(ids)) == 3
    assert ids[2] == "sokoban"  # a run that an earlier release began goes on
    (first / "logs" / "wandb").mkdir()
    assert [wandb_id(folder) for folder in (first, second, earlier)] == ids


def test_weights_and_biases_keeps_them_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "logs").mkdir()
    (sink,) = open_sinks(["wandb"], tmp_path, "run")
    keep_all(tmp_path, sink)
    tables = {path.name.split("_")[0]: json.loads(path.read_text()) for path in tmp_path.rglob("*.table.json")}
    assert tables["rl"]["columns"][3:6] == ["prompt", "answer", "reward"] and tables["rl"]["data"][0][3:6] == [
        "1|\n2<",
        "a",
        0.5,
    ]
    assert tables["evaluate"]["data"] == [["empty answer", "baseline", "greedy", 0.25, 0.1, 0.4, 20]]
    assert list(tmp_path.rglob("*.wandb"))
