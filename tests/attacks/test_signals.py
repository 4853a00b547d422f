"""Signals at random moments: a run that is started again and again ends like one that nobody disturbed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def signalled(folder: Path, signals: int, seed: int) -> dict[str, int]:
    command = [sys.executable, "-m", "terrella.tests.attacks.forks", str(folder), str(signals), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_few_signals(tmp_path: Path) -> None:
    counts = signalled(tmp_path, 4, seed=1)
    assert counts.keys() <= {"signals", "runs"} and counts["signals"] == 4, counts


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_a_hundred_signals(tmp_path: Path) -> None:
    counts = signalled(tmp_path, 100, seed=2)
    print(counts)
    assert counts.keys() <= {"signals", "runs"} and counts["signals"] == 100, counts
