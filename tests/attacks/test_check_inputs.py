"""Hostile inputs to `terrella check`: each is named in time, and none ends it by chance, silently or with a flood."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_every_hostile_input_is_named(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    command = [sys.executable, "-m", "terrella.tests.attacks.check_inputs", str(tmp_path / "place")]
    with open(tmp_path / "ends.jsonl", "w") as told:
        done = subprocess.run(command, stdout=told, stderr=subprocess.PIPE, text=True, timeout=7000)
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line) for line in (tmp_path / "ends.jsonl").read_text().splitlines()]
    slowest = max(ends, key=lambda end: end["s"])
    passed = sum(end["code"] == 0 for end in ends)
    print(f"{len(ends)} inputs, {passed} pass; the slowest took {slowest['s']} s: {slowest}")
    assert len(ends) >= 275
    assert [end for end in ends if end["broken"]] == []
