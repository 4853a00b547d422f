"""A live owner keeps its run directory, from wherever it is looked at and whatever the clock does."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from terrella.core import lease as leases
from terrella.core.errors import LeaseError, StorageError
from terrella.core.files import read_json, write_json

UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]
ACQUIRE = (
    "import sys; from pathlib import Path; from terrella.core.lease import Lease; "
    "Lease.acquire(Path(sys.argv[1])); print('taken')"
)


def test_a_step_of_the_clock_steals_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = leases.Lease.acquire(tmp_path)
    begun = psutil.Process.create_time
    # what a step of 1.5 s makes of it
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: begun(self) + 1.5)
    with pytest.raises(LeaseError, match="in use"):
        leases.Lease.acquire(tmp_path)
    lease.release()


def test_a_live_owner_is_not_robbed_from_another_pid_namespace(tmp_path: Path) -> None:
    if (
        shutil.which("unshare") is None
        or subprocess.run([*UNSHARE, "true"], capture_output=True, timeout=60).returncode
    ):
        pytest.skip("unshare cannot make a PID namespace here")
    lease = leases.Lease.acquire(tmp_path)
    command = [*UNSHARE, sys.executable, "-c", ACQUIRE, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert told.returncode and "in use by process" in told.stderr and leases.holds(tmp_path, lease.token), told
    lease.release()


def test_a_silent_owner_that_cannot_be_asked_is_replaced_without_being_told_to_wait(tmp_path: Path) -> None:
    # as an earlier release wrote it
    write_json(tmp_path / "lease.json", {"token": "t", "incarnation": 4, "host": "gone", "pid": 7})
    begun = time.monotonic()
    lease = leases.Lease.acquire(tmp_path, timeout_s=2.0)
    assert lease.incarnation == 5 and time.monotonic() - begun >= 2.0
    lease.release()


@pytest.mark.parametrize("content", [{}, [], {"token": 1}])
def test_a_lease_that_names_nobody_is_refused_by_name(tmp_path: Path, content: object) -> None:
    write_json(tmp_path / "lease.json", content)
    with pytest.raises(StorageError, match=r"lease\.json: damaged"):
        leases.Lease.acquire(tmp_path)
    assert read_json(tmp_path / "lease.json") == content


@pytest.mark.parametrize("step_s", [1, 3600, -3600])
def test_a_step_of_either_clock_neither_steals_a_lease_nor_keeps_a_dead_one(tmp_path: Path, step_s: int) -> None:
    """An owner that cannot be asked is judged by whether the file's time changes, never by what time it says."""
    write_json(tmp_path / "lease.json", {"token": "t", "incarnation": 4, "host": "elsewhere", "pid": 7})
    alive = threading.Event()

    def renew() -> None:
        while not alive.wait(0.3):
            stepped = time.time_ns() + step_s * 10**9
            os.utime(tmp_path / "lease.json", ns=(stepped, stepped))

    owner = threading.Thread(target=renew)
    owner.start()
    with pytest.raises(LeaseError, match="in use by process 7 on elsewhere"):
        leases.Lease.acquire(tmp_path, timeout_s=3.0)
    alive.set()
    owner.join()
    begun = time.monotonic()
    lease = leases.Lease.acquire(tmp_path, timeout_s=1.5)
    assert lease.incarnation == 5 and 1.5 <= time.monotonic() - begun < 60
    lease.release()
