"""The recipes of RT-1 from folders of the released layout: what stands in for training is evaluated, trained on by
RLVR, and exported.

The folders are stand-ins: narrow, small pictures, fresh weights. The graph, the action bins and the kinds of files are
the recipe's own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from terrella.core.errors import ConfigError
from terrella.data.convert.npz import episode_sample
from terrella.data.schema import VIDEO
from terrella.data.shards import ShardWriter
from terrella.data.video_actions import RT1_RANGES
from terrella.launch import released
from terrella.models.hf import read_config

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]
SMALL = ["ranks=1", "precision.params=fp32", "env.heldout_every=3", "stages.tokenizer.bf16=false"]
SMALL += [
    f"env.{setting}"
    for setting in ("context_reach=3", "bf16=false", "metrics=[mae, psnr]", "headline=mae", "runs=1", "best_of=[]")
]
SMALL += [
    "stages.tokenizer.frames_per_clip=2",
    "stages.tokenizer.heldout_clips=2",
    "stages.evaluate.n=2",
    "stages.evaluate.samples=1",
]
SIZES = {"video-rt1": (32, 64), "video-rt1-single": (32, 48)}
VOCAB = {"video-rt1": 4375 * 2 + 256 + 2, "video-rt1-single": 4375 + 256 + 2}
SHORT = {"video-rt1": "env.horizon=2", "video-rt1-single": "env.history=2"}


def prepare(name: str, folder: Path) -> list[str]:
    """Episodes and stand-ins in a folder; gives the settings of the recipe that fit them."""
    height, width = SIZES[name]
    size = [f"env.tokenizer.height={height}", f"env.tokenizer.width={width}", SHORT[name]]
    rng = np.random.default_rng(0)
    low, high = np.array(RT1_RANGES).T
    with ShardWriter(folder / "shards", kind=VIDEO) as writer:
        for _ in range(6):
            frames = rng.integers(0, 256, (6, height, width, 3), dtype=np.uint8)
            writer.write(episode_sample({"image": frames}, rng.uniform(low, high, (6, 13)).astype(np.float32), None))
    kept = released.RECIPES[name][0]
    narrow = released.stand_ins(name, folder, 16, 1, tuple(size))
    sources = [f"env.shards={folder / 'shards'}", f"stages.tokenizer.released={folder / kept}"]
    return [*size, *narrow, *SMALL, *sources, start("pretrain", world(name, folder, "base"))]


def start(stage: str, folder: Path) -> str:
    """The setting by which a stage takes released weights."""
    return f"stages.{stage}={{kind: start, name: {stage}, folder: {folder}}}"


def world(name: str, folder: Path, arm: str) -> Path:
    return folder / f"rt1-world-model-{released.RECIPES[name][1]}-step-{arm}"


def train(name: str, run: Path, settings: list[str]) -> subprocess.CompletedProcess:
    words = [sys.executable, "-m", "terrella", "train", name, "--run", str(run)]
    words += [part for setting in settings for part in ("--set", setting)]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=900, env=os.environ | {"TERRELLA_LPIPS": str(run / "no weights")}
    )


def outcomes(run: Path) -> dict[str, dict]:
    return {p.stem: json.loads(p.read_text()) for p in (run / "stages").glob("*.json")}


@pytest.mark.parametrize("name", ["video-rt1", pytest.param("video-rt1-single", marks=pytest.mark.full)])
def test_rlvr_from_released_folders(name: str, tmp_path: Path) -> None:
    """And first: what a later stage would miss, here the weights of the rewarded metric, stops the run before its
    first stage.
    """
    settings = prepare(name, tmp_path)
    settings += ["env.clips_per_episode=1", "stages.rlvr.steps=1", "stages.rlvr.prompts_per_step=4"]
    settings += ["stages.rlvr.samples_per_prompt=2", "stages.control.sequences_per_step=2"]
    done = train(name, tmp_path / "refused", settings)
    assert done.returncode == 2 and "LPIPS needs" in done.stderr, done.stderr[-2000:] + done.stdout[-2000:]
    assert not outcomes(tmp_path / "refused"), "no stage had begun"
    done = train(name, tmp_path / "run", [*settings, "env.reward={mae: 1, lpips: 0}"])
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    found = outcomes(tmp_path / "run")
    assert found["tokenizer"]["steps"] == found["pretrain"]["steps"] == 0
    assert found["rlvr"]["tokens"] > 0 and found["control"]["tokens"] >= found["rlvr"]["tokens"]
    assert found["evaluate"]["rlvr minus control/mae"]["n"] == 2
    base = load_file(world(name, tmp_path, "base") / "model.safetensors")
    trained = load_file(tmp_path / "run" / "export" / "model.safetensors")
    assert base.keys() == trained.keys() and read_config(tmp_path / "run" / "export").vocab == VOCAB[name]
    moved = {key: float((trained[key].float() - base[key]).abs().max()) for key in base}
    assert 0 < max(moved.values()) < 0.02, moved  # a step of RLVR away from the released weights


@pytest.mark.full
@pytest.mark.parametrize("name", ["video-rt1", "video-rt1-single"])
def test_the_table_from_released_folders(name: str, tmp_path: Path) -> None:
    settings = prepare(name, tmp_path)
    done = train(f"{name}-released", tmp_path / "run", [*settings, start("rlvr", world(name, tmp_path, "rlvr"))])
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    found = outcomes(tmp_path / "run")
    assert (
        found["tokenizer"]["steps"] == found["pretrain"]["steps"] == found["rlvr"]["steps"] == 0
        and found["tokens"]["clips"] == 0
    )
    table = json.loads((tmp_path / "run" / "results" / "evaluate.json").read_text())
    rows = {row["name"]: row["cells"] for row in table["rows"]}
    models = [name for name in rows if name in ("pretrain", "rlvr")]
    assert models == ["pretrain", "rlvr"] and rows["pretrain"][0] != rows["rlvr"][0]


def test_a_width_that_does_not_divide_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--divide 3 does not divide groups \(32\)"):
        released.stand_ins("video-rt1", tmp_path, 3, 1)
