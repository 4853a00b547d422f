"""Runs decode_cases.py: under Triton's interpreter in a process of its own, compiled on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).with_name("decode_cases.py")


def run_cases(environment: dict[str, str], limit: int) -> None:
    command = [sys.executable, "-m", "pytest", str(CASES), "-q", "-x", "--import-mode=importlib", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_cached_attention_and_sampling_through_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_cases({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}, 1000)


@pytest.mark.gpu
def test_cached_attention_and_sampling_on_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    run_cases({}, 1000)
