"""`terrella eval` and `terrella worlds imagine` of a grid world model with fresh weights, which is never right."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from terrella.launch.cli import cli
from terrella.models.config import ModelConfig
from terrella.models.stand_in import write_weights
from terrella.rl.grid.imagination import GridDynamics


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("grid") / "fresh"
    write_weights(ModelConfig(vocab=GridDynamics.of("SimpleSokoban").tokenizer().vocab_size), folder)
    return folder


def _run(*args: str) -> str:
    done = CliRunner().invoke(cli, list(args), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_table_has_the_baseline_the_model_at_each_temperature_and_the_true_world(folder: Path, tmp_path) -> None:
    asked = ["SimpleSokoban", "--model", str(folder), "--n", "2", "--rooms", "1", "--out", str(tmp_path / "table.json")]
    assert "n = 2 tasks in 1 fresh rooms" in _run("eval", *asked, "--steps", "2")
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["columns"][1] == "all 2 steps exact"
    names = [row["name"] for row in table["rows"]]
    assert names == ["copy the state", "fresh, greedy", "fresh, temperature 1", "the true world"]
    assert [row["cells"][1]["value"] for row in table["rows"][1:]] == [0.0, 0.0, 1.0]
    assert "fresh, greedy" in _run("eval", *asked, "--drift", "2", "--temperature", "0")
    drift = json.loads((tmp_path / "table.json").read_text())
    assert drift["columns"] == ["k = 1", "k = 2"] and len(drift["rows"]) == 3


def test_imagined_trajectories_are_printed(folder: Path) -> None:
    told = _run("worlds", "imagine", "SimpleSokoban", "--model", str(folder), "--n", "1", "--steps", "1")
    assert "task 0: 0 % of the states exact" in told and ": wrong" in told
