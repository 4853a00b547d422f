"""A run as a container sees it: the command is process 1, and a stop may be asked for at any moment."""

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from terrella.tests.launch import tiny_run
from terrella.tests.sampling import sampled

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]
UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]


def needs_namespaces() -> None:
    """Skip where this machine lets nobody make a PID namespace."""
    if (
        shutil.which("unshare") is None
        or subprocess.run([*UNSHARE, "true"], capture_output=True, timeout=60).returncode
    ):
        pytest.skip("unshare cannot make a PID namespace here")


def first_stage(run: Path) -> list[str]:
    return [*tiny_run.command(run), "--until", "selfplay"]


def test_the_first_process_of_a_container_trains(tmp_path: Path) -> None:
    needs_namespaces()
    done = subprocess.run(
        [*UNSHARE, *first_stage(tmp_path / "run")], capture_output=True, text=True, timeout=tiny_run.PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "stages" / "selfplay.json").exists()


@pytest.mark.parametrize("sign", sampled(["lease.json", "logs/rank-0.log"], 1))
def test_a_stop_asked_for_before_the_workers_listen_is_a_stop(tmp_path: Path, sign: str) -> None:
    """`sign` exists before the workers can handle a signal."""
    run = tmp_path / "run"
    process = subprocess.Popen(first_stage(run), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + tiny_run.PATIENCE_S
        while not (run / sign).exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=tiny_run.PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 75 and "stopped on request" in error, (process.returncode, error)
    again = subprocess.run(first_stage(run), capture_output=True, text=True, timeout=tiny_run.PATIENCE_S)
    assert again.returncode == 0, again.stderr
