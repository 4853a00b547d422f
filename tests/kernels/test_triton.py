"""Runs triton_cases.py: under Triton's interpreter in a process of its own, so that no other test sees it; compiled on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).with_name("triton_cases.py")


def run_cases(environment: dict[str, str], limit: int) -> str:
    command = [sys.executable, "-m", "pytest", str(CASES), "-q", "-x", "--import-mode=importlib", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_kernels_through_the_interpreter():
    pytest.importorskip("triton")
    out = run_cases({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}, 1000)
    assert " passed" in out and " failed" not in out


@pytest.mark.gpu
def test_kernels_on_the_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert " passed" in run_cases({}, 1000)
