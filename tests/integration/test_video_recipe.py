"""The video recipe runs from MuJoCo episodes to an exported model, with every number turned down; it resumes; its
report plays.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

# MuJoCo is not imported here: how it draws is fixed by the first import in a process
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(importlib.util.find_spec("mujoco") is None, reason="MuJoCo is not installed"),
]

SMALL = [
    "ranks=2",
    "env.recording={episodes: 24, heldout_episodes: 8, frames: 8}",
    "stages.1.steps=6",
    "stages.1.clips_per_step=8",  # those of the recipe are for one rank
    "stages.1.heldout_clips=4",
    "stages.1.optimizer={lr: 1e-3}",
    "env.clips_per_episode=2",
    "stages.3.steps=8",
    "stages.3.sequences_per_step=8",
    "stages.3.optimizer={lr: 1e-3}",
    "stages.4.steps=2",
    "stages.4.prompts_per_step=2",
    "stages.4.samples_per_prompt=4",
    "stages.5.sequences_per_step=8",
    "stages.6.n=4",
    "stages.6.samples=2",
    "env.best_of=[1, 2]",
    "stages.6.arms.pretrain.env.reject_repeats=1",
    "stages.7.tasks=[close]",
    "stages.7.policies=[scripted, random]",
    "stages.7.episodes=2",
    "stages.7.frames=6",
]


def command(run: Path, *more: str) -> list[str]:
    sets = [part for override in SMALL for part in ("--set", override)]
    return [sys.executable, "-m", "terrella", "train", "video-tiny", "--run", str(run), *sets, *more]


def test_recipe_runs_through(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = subprocess.run(command(run, "--until", "pretrain"), capture_output=True, text=True, timeout=1500)
    assert first.returncode == 0, first.stderr[-2000:] + first.stdout[-2000:]
    assert not (run / "stages" / "rlvr.json").exists()
    done = subprocess.run(command(run), capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    stages = {p.stem: json.loads(p.read_text()) for p in (run / "stages").glob("*.json")}
    assert 0 < stages["tokenizer"]["heldout/codes_used"] <= 1 and stages["tokens"] == stages["tokens"] | {
        "clips": 48,
        "heldout_clips": 8,
    }
    # steps, prompts, samples, frames, codes: forced actions do not count
    assert stages["rlvr"]["tokens"] == 2 * 2 * 4 * 2 * 16
    assert stages["control"]["tokens"] >= stages["rlvr"]["tokens"]
    tables = {p.stem: json.loads(p.read_text()) for p in (run / "results").glob("*.json")}
    told = tables["evaluate"]
    assert [row["kind"] for row in told["rows"]] == ["baseline", "model", "control", "model", "control", "other"]
    assert told["columns"] == ["mae", "mse", "psnr", "ssim", "moved", "repeats"]
    assert all(0 < row["cells"][0]["value"] < 1 for row in told["rows"])
    curve = [cell["value"] for cell in tables["evaluate-best-of"]["rows"][1]["cells"]]
    assert curve == sorted(curve, reverse=True)
    gap = stages["evaluate"]["rlvr minus control/mae"]
    assert gap["n"] == 4 and gap["value"] == pytest.approx(
        stages["evaluate"]["rlvr/mae"] - stages["evaluate"]["control/mae"], abs=1e-6
    )
    assert tables["tokenizer"]["rows"][1]["cells"][1] == stages["tokenizer"]["heldout/psnr"]
    assert sum(tables["rlvr-time"]["rows"][0]["cells"][1:4]) == pytest.approx(1.0)
    assert {"real2sim", "real2sim-agreement"} <= set(tables) and "detector_agrees" in stages["real2sim"]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rlvr = [m for m in metrics if m["stage"] == "rlvr"]
    assert len(rlvr) == 2 and all(
        {"reward/mean", "reward/group_std", "clip/mae", "clip/repeats", "time/judge_s"} <= set(m) for m in rlvr
    )
    text = (run / "report.html").read_text()
    assert "data:image/png;base64," in text and "Held-out clips" in text
    assert (run / "export" / "model.safetensors").exists()
    words = [sys.executable, "-m", "terrella.tests.rl.exchange.play_run", str(run), "tabletop/close"]
    served = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert served.returncode == 0, served.stderr[-2000:]
    played = json.loads(served.stdout.splitlines()[-1])
    assert played["frame"] == [32, 32, 3] and played["again"] and "drawer" in played["start"]
    assert 0 < played["info"]["mae"] < 1 and played["info"]["exact"] in (0.0, 1.0)


@pytest.mark.full
def test_shipped_settings_raise_the_reward(tmp_path: Path) -> None:
    """The recipe as it is: the codes of frames carry motion, and RLVR predicts held-out clips better than the model
    it started from.
    """
    run = tmp_path / "run"
    words = [sys.executable, "-m", "terrella", "train", "video-tiny", "--run", str(run), "--until", "evaluate"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=2900)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    stages = {p.stem: json.loads(p.read_text()) for p in (run / "stages").glob("*.json")}
    assert stages["tokenizer"]["heldout/perplexity"] > 8  # collapsed codes have 1 to 2
    assert stages["tokenizer"]["heldout/psnr"] > 24
    told = json.loads((run / "results" / "evaluate.json").read_text())
    mae = {row["name"]: row["cells"][0]["value"] for row in told["rows"]}
    rise = stages["evaluate"]["rlvr minus pretrain/mae"]  # paired by clip; the reward is minus the MAE
    assert rise["n"] == 96 and rise["high"] < 0, (mae, stages["evaluate"])
