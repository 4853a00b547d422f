"""Sinks mirror the record; a missing package is named."""

import importlib.util

import pytest

from terrella.core.errors import ConfigError
from terrella.core.metrics import MetricsFile
from terrella.core.sinks import open_sinks


class Memory:
    def __init__(self) -> None:
        self.rows: list[tuple] = []

    def write(self, stage, step, values) -> None:
        self.rows.append((stage, step, dict(values)))


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
