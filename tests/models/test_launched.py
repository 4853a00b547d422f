"""A training pass on a GPU takes the fused kernels, and each as often as it should; see launched.py. Needs no GPU."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from terrella.tests.sampling import in_turn

KERNELS = {  # of each layer
    "dense": {"rmsnorm._forward_kernel": 2, "rmsnorm._backward_kernel": 2, "qkv._qkv_kernel": 2},
    "norms": {"rmsnorm._forward_kernel": 4, "rmsnorm._backward_kernel": 4, "rope._rope_kernel": 4},
}


@pytest.fixture(scope="module")
def passes() -> Iterator[dict[str, subprocess.Popen]]:
    """A process for each model, all at once: most of their time goes into imports."""
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "terrella.tests.models.launched"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = {model: subprocess.Popen([*command, model], env=environment, **pipes) for model in KERNELS}
    try:
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.wait(timeout=60)


@pytest.mark.parametrize("model", KERNELS)
@in_turn("fused layers")
def test_fused_kernels_are_taken(model: str, passes: dict[str, subprocess.Popen]) -> None:
    out, err = passes[model].communicate(timeout=300)
    assert passes[model].returncode == 0, err[-3000:]
    counted = json.loads(out.splitlines()[-1])
    want = {name: count * counted["layers"] for name, count in (KERNELS[model] | {"swiglu._swiglu_kernel": 2}).items()}
    for side in ("forward", "backward"):
        want[f"rmsnorm._{side}_kernel"] += 1  # the last norm
    assert counted["launched"] == want
