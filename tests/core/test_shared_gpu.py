"""Ranks that share a GPU tell one another everything through host memory; with CUDA:
tests/parallel/test_shared_gpu.py.
"""

import subprocess
import sys
from pathlib import Path


def test_staged_collectives_give_what_they_must(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "terrella.tests.core.staged_jobs"]
    ranks = [
        subprocess.Popen([*words, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(told)[-3000:]
