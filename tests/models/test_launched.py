"""A training pass on a GPU takes the fused kernels, and each as often as it should; see launched.py. Needs no GPU."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("model", "each"),
    [
        ("dense", {"rmsnorm_triton._forward_kernel": 2, "rmsnorm_triton._backward_kernel": 2, "qkv_triton._qkv_kernel": 2}),
        ("norms", {"rmsnorm_triton._forward_kernel": 4, "rmsnorm_triton._backward_kernel": 4, "rope_triton._rope_kernel": 4}),
    ],
)
def test_fused_kernels_are_taken(model: str, each: dict[str, int]) -> None:
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "terrella.tests.models.launched", model], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    want = {name: count * told["layers"] for name, count in (each | {"swiglu_triton._swiglu_kernel": 2}).items()}
    for side in ("forward", "backward"):
        want[f"rmsnorm_triton._{side}_kernel"] += 1  # the last norm
    assert told["launched"] == want
