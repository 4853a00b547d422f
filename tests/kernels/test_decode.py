"""Runs decode_cases.py: under Triton's interpreter (conftest.py starts it), compiled on a GPU."""

import subprocess

import pytest
import torch

from terrella.tests.kernels.conftest import cases
from terrella.tests.sampling import in_turn


@in_turn("decoding interpreted")
def test_cached_attention_and_sampling_through_the_interpreter(outcome_of) -> None:
    done = outcome_of("test_decode.py")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " failed" not in done.stdout


@pytest.mark.gpu
def test_cached_attention_and_sampling_on_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    done = subprocess.run(cases("decode_cases.py"), capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
