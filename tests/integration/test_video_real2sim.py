"""Real2Sim of RT-1's kind from a user's own folder: recorded episodes, policies and a judge by path, true rates in a
file, inside the released world models' stand-ins; and its rehearsal.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from terrella.launch import released
from terrella.tests.rl.video.drawers import write_folder

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]
HEIGHT, WIDTH = 32, 64
RECIPE = """
base: video-rt1-released
name: mine
ranks: RANKS
env: {shards: shards, heldout_every: 2}
stages:
  evaluate:
    kind: video-real2sim
    name: real2sim
    models: [pretrain, rlvr]
    tasks: [open * drawer, close * drawer]
    policies: [policies.py:Skilled, policies.py:Idle]
    judge: judge.py:moved
    truth: real.yaml
    episodes: 2
    frames: 5
    repetition_penalty: 1.2
"""


def terrella(folder: Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "terrella", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1200)


def test_policies_of_ones_own_are_ranked(tmp_path: Path) -> None:
    write_folder(tmp_path, HEIGHT, WIDTH)
    (tmp_path / "mine.yaml").write_text(RECIPE.replace("RANKS", "2"))
    size = [f"env.tokenizer.height={HEIGHT}", f"env.tokenizer.width={WIDTH}", "env.horizon=2", "env.context_reach=3"]
    narrow = released.stand_ins("video-rt1", tmp_path / "released", 16, 1, tuple(size))
    settings = [*size, *narrow, "precision.params=fp32", "env.bf16=false", "stages.tokenizer.bf16=false"]
    settings += ["stages.tokenizer.frames_per_clip=2", "stages.tokenizer.heldout_clips=2"]
    words = [part for setting in settings for part in ("--set", setting)]
    wrong = terrella(tmp_path, "train", "mine.yaml", "--run", "wrong", *words, "--set", "stages.real2sim.episodes=20")
    assert wrong.returncode == 2 and "of the 6 episodes have the instruction" in wrong.stderr, wrong.stderr[-2000:]
    done = terrella(tmp_path, "train", "mine.yaml", "--run", "run", *words)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    tables = {p.stem: json.loads(p.read_text()) for p in (tmp_path / "run" / "results").glob("real2sim*.json")}
    success, agreed, judge = (tables[f"real2sim{part}"] for part in ("", "-agreement", "-judge"))
    assert success["columns"] == [f"{t} * drawer/{p}" for t in ("open", "close") for p in ("Skilled", "Idle")]
    rows = {row["name"]: row["cells"] for row in success["rows"]}
    assert list(rows) == ["in reality", "pretrain", "rlvr"]
    assert rows["in reality"][0]["n"] == 27 and rows["in reality"][2] == 0.889  # one says of how many, one does not
    assert all(cell["n"] == 2 and 0 <= cell["low"] <= cell["high"] <= 1 for cell in rows["rlvr"])
    lines = {row["name"]: row["cells"] for row in agreed["rows"]}
    assert "every policy succeeds half the time" in lines and "rlvr, close * drawer" in lines
    assert all(cell["low"] <= cell["value"] <= cell["high"] for cell in lines["rlvr"][1:])
    trusted = {row["name"]: [cell["value"] for cell in row["cells"]] for row in judge["rows"]}
    assert trusted["recorded frames"] == [1.0, 1.0] and trusted["the first frame for ever"] == [0.0, 0.0]
    assert {"rlvr, recorded actions", "rlvr, standing still"} <= set(trusted)
    outcome = json.loads((tmp_path / "run" / "stages" / "real2sim.json").read_text())
    assert outcome["judged done/recorded frames"] == 1.0 and outcome["rlvr/gap"] == pytest.approx(
        lines["rlvr"][2]["value"]
    )


@pytest.mark.full
@pytest.mark.parametrize("there", [True, False], ids=["with-episodes", "without"])
def test_it_is_rehearsed(there: bool, tmp_path: Path) -> None:
    write_folder(tmp_path, 48, 60)  # larger than a rehearsal's
    (tmp_path / "mine.yaml").write_text(
        RECIPE.replace("RANKS", "2").replace("shards: shards", "shards: shards" if there else "shards: nowhere")
    )
    done = terrella(tmp_path, "check", "mine.yaml", "--rehearse", "--keep", "kept")
    assert done.returncode == 0 and "went through in" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    success = json.loads((tmp_path / "kept" / "run" / "results" / "real2sim.json").read_text())
    mine = ["open * drawer/Skilled", "close * drawer/Idle"]
    assert [column in success["columns"] for column in mine] == [there, there]
