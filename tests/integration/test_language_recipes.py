"""The language recipes run from data to export, with every number turned down; a resumed run equals an uninterrupted one elsewhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from terrella.launch.report import tables

pytestmark = pytest.mark.integration

SMALL = [
    "model.layers=1",
    "model.hidden=32",
    "model.heads=2",
    "model.kv_heads=2",
    "model.head_dim=16",
    "model.ffn=48",
    "stages.1.steps=4",
    "stages.1.sequences_per_step=8",
    "stages.2.steps=2",
    "stages.2.prompts_per_step=2",
    "stages.2.samples_per_prompt=2",
    "stages.2.max_new_tokens=8",
    "stages.2.algorithm={kind: grpo, entropy_coef: 0.01}",
    "stages.3.sequences_per_step=8",
    "stages.4.n=6",
    "stages.4.max_new_tokens=8",
    "stages.5.n=6",
    "stages.5.max_new_tokens=8",
]
OWN = {
    "text-game-tiny": [
        "stages.5.drift_steps=2",
        "stages.5.drift_episodes=2",
        "stages.0.seeds=1",
        "stages.0.games=[weigh-stones]",
        "stages.0.unseen_games=[fill-bucket]",
    ],
    "web-page-tiny": [],
}


@pytest.mark.parametrize("recipe", OWN)
def test_recipe_runs_through(recipe: str, tmp_path: Path) -> None:
    sets = [part for override in (*SMALL, *OWN[recipe]) for part in ("--set", override)]
    done = subprocess.run(
        [sys.executable, "-m", "terrella", "train", recipe, "--run", str(tmp_path / "run"), *sets],
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    run = tmp_path / "run"
    found = {path.stem: json.loads(path.read_text()) for path in (run / "results").glob("*.json")}
    assert {"evaluate-test", "evaluate-unseen", "greedy-test"} <= set(found)
    told = found["evaluate-test"]
    assert [row["kind"] for row in told["rows"]] == ["baseline", "model", "model", "control", "ceiling"]
    assert all(set(row) >= {"name", "kind", "cells"} and row["kind"] in tables.KINDS for row in told["rows"])
    assert all(cell["value"] == 1.0 for cell in told["rows"][-1]["cells"])  # strict: the true answer is right
    if recipe == "text-game-tiny":
        assert [row["cells"][0]["n"] for row in found["greedy-drift"]["rows"]] == [2] * 5
    control, rlvr = (json.loads((run / "stages" / f"{name}.json").read_text()) for name in ("control", "rlvr"))
    assert control["tokens"] >= rlvr["tokens"]
    assert "beyond chance" in (text := json.loads((run / "summary.json").read_text())["headline"]) or "->" in text
    assert (run / "export" / "model.safetensors").exists() and (run / "report.html").exists()
