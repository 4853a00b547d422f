"""Signals at random moments: a run that is started again and again ends like one that nobody disturbed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def signalled(folder: Path, signals: int, seed: int, slow_s: float = 0.0) -> dict[str, int]:
    words = [str(folder), str(signals), str(seed), str(slow_s)]
    command = [sys.executable, "-m", "terrella.tests.attacks.forks", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
def test_a_few_signals(tmp_path: Path) -> None:
    counts = signalled(tmp_path, 4, seed=1)
    assert counts.keys() <= {"signals", "in flight", "runs"} and counts["signals"] == 4, counts


def test_signals_while_checkpoints_are_being_written(tmp_path: Path) -> None:
    """Where the disk is slow most of a run passes with a save under way."""
    counts = signalled(tmp_path, 6, seed=3, slow_s=0.3)
    assert counts.keys() <= {"signals", "in flight", "runs"} and counts["in flight"] >= 2, counts


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_a_hundred_signals(tmp_path: Path) -> None:
    counts = signalled(tmp_path, 100, seed=2)
    print(counts)
    assert counts.keys() <= {"signals", "in flight", "runs"} and counts["signals"] == 100, counts
