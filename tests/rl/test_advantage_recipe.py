"""A recipe with a GRPO and a PPO stage takes the advantage kernels on a GPU; see advantage_recipe.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from terrella.tests.sampling import in_turn

# a launch a step and stage: group statistics, their spread over tokens, and the two levels of GAE
WANTED = {"_group_kernel": 2, "_spread_kernel": 2, "_gae_kernel": 4}


def train(how: str, folder: Path, environment: dict[str, str]) -> dict:
    command = [sys.executable, "-m", "terrella.tests.rl.advantage_recipe", how, str(folder)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@in_turn("advantages")
def test_kernels_give_the_recipe_what_the_cpu_gives(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    here = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    plain = train("plain", tmp_path / "plain", here)
    kernels = train("interpreted", tmp_path / "kernels", here | {"TRITON_INTERPRET": "1"})
    assert plain["launched"] == {} and kernels["launched"] == WANTED
    assert len(plain["rows"]) == 4 and plain["rows"][1]["loss"] != 0
    names = ("loss", "grad_norm", "critic/loss", "critic/grad_norm")
    for got, want in zip(kernels["rows"], plain["rows"], strict=True):
        told = {name: want[name] for name in names if name in want}
        assert {name: got[name] for name in told} == pytest.approx(told, rel=1e-5, abs=1e-6), (
            want["stage"],
            want["step"],
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recipe_on_a_gpu_launches_them(tmp_path: Path) -> None:
    assert train("plain", tmp_path / "run", {})["launched"] == WANTED
