"""Every kernel of the project compiles for an H100, and reads and writes memory in wide words; see compile_cases.py. Needs no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# a few numbers a row; rows of any length, which begin anywhere
NARROW = {
    "logprob_triton._finish_kernel",
    "logprob_triton._merge_kernel",
    "advantage_triton._group_kernel",
    "advantage_triton._spread_kernel",
}

ROWS = {"logprob_triton._stats_kernel", "logprob_triton._backward_kernel"}  # wide for every vocabulary, odd ones too


def test_every_kernel_compiles_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(Path(__file__).with_name("compile_cases.py")), "90"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    wide: dict[str, int] = {}
    for one in told[1:]:
        assert one["cubin"] > 0
        wide[one["kernel"]] = max(one["wide"], wide.get(one["kernel"], 0))
    assert set(told[0]["all"]) == set(wide), "a kernel that compile_cases.py does not call"
    assert {name for name, count in wide.items() if count == 0} <= NARROW
    assert all(one["wide"] for one in told[1:] if one["kernel"] in ROWS)
