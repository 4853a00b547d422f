"""Stock TRL trains on our Sokoban, as it is served over OpenEnv, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openenv.core.env_server", reason="the extra openenv is not installed")
pytest.importorskip("trl", reason="trl is not installed")

from terrella.tests.rl.exchange.test_openenv import servers

__all__ = ["servers"]  # a fixture


@pytest.mark.full
def test_grpo_with_an_environment_factory(servers: dict[str, str], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "terrella.tests.rl.exchange.trl_sokoban",
        servers["sokoban"],
        str(tmp_path / "trl"),
        "2",
    ]
    made = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"TRL_EXPERIMENTAL_SILENCE": "1"}, capture_output=True, timeout=1200
    )
    assert made.returncode == 0, made.stderr[-3000:].decode()
    said = json.loads(made.stdout.splitlines()[-1])
    print(said)
    assert len(said["steps"]) == 2 and said["weights_moved"] > 0
    assert all(step["tools/call_frequency"] > 0 and step["tools/failure_frequency"] == 0 for step in said["steps"])
    # at most three actions of -0.1
    assert all(-0.3 - 1e-6 <= step["reward"] < 11 and step["grad_norm"] > 0 for step in said["steps"])
