"""One writer per run directory: a lease with an incarnation number that fences off earlier holders.

The holder renews the file's modification time. A newcomer takes the lease if the holder's process is dead. If that
cannot be checked (another boot, machine or PID namespace), it waits until the file has not been renewed for `timeout_s`
on its own monotonic clock, since wall clocks may step. An old holder that wakes up finds a higher incarnation and stops
before its next write. A job that the scheduler requeued takes the lease at once, even from a live holder: the scheduler
has judged the earlier start dead or cut off.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

from .errors import DeadlineError, LeaseError, StorageError
from .files import read_json, storage_errors, write_json

log = logging.getLogger("terrella")
RENEW_S = 5.0
TIMEOUT_S = 30.0
LOCK_S = 60.0  # work under the lock takes milliseconds


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    path, deadline = folder / "lease.lock", time.monotonic() + LOCK_S
    with storage_errors(path), open(path, "w") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise DeadlineError(
                        f"{path}: another process has kept it locked for {LOCK_S:g} s; it may be suspended (Ctrl-Z): "
                        "resume it or end it"
                    ) from None
            time.sleep(0.05)
        yield


def _place() -> str:
    """What a process id is unique within: one boot of one machine, and one PID namespace."""
    if sys.platform != "linux":
        return socket.gethostname()
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _start_time(pid: int) -> float:
    """When a process started: on Linux in ticks since boot, which do not depend on the wall clock."""
    if sys.platform != "linux":
        return psutil.Process(pid).create_time()
    try:
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError as error:
        raise psutil.NoSuchProcess(pid) from error


def _process_alive(holder: dict) -> bool | None:
    """Whether the holder's process is alive; None if that cannot be checked from here."""
    if holder.get("place") != _place():
        return None
    try:
        if psutil.Process(holder["pid"]).status() == psutil.STATUS_ZOMBIE:  # dead, not yet reaped by its parent
            return False
        return _start_time(holder["pid"]) == holder.get("begun")
    except (psutil.NoSuchProcess, ValueError, OverflowError):  # also if the pid is not a valid one
        return False


def read_holder(folder: Path) -> dict | None:
    """The current or last holder of a run directory; None if there never was one."""
    path = folder / "lease.json"
    holder = read_json(path)
    wanted = {"token": str, "incarnation": int, "host": str, "pid": int}
    if holder is not None and not (
        isinstance(holder, dict) and all(isinstance(holder.get(k), kind) for k, kind in wanted.items())
    ):
        raise StorageError(
            f"{path}: damaged, it does not say who owns the run; delete it when nobody writes this run, and start again"
        )
    return holder


def scheduler_start() -> tuple[str, int] | None:
    """The SLURM job this process belongs to, and how often it was requeued; None outside a job."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return None
    return f"{os.environ.get('SLURM_CLUSTER_NAME', '')}/{job}", int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def _superseded(holder: dict) -> bool:
    start = scheduler_start()
    return start is not None and holder.get("job") == start[0] and holder.get("restart", 0) < start[1]


class Lease:
    """Ownership of a run directory, held until `release` or the end of the process."""

    def __init__(self, folder: Path, token: str, incarnation: int) -> None:
        self.folder, self.token, self.incarnation = folder, token, incarnation
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def acquire(cls, folder: Path, wait_s: float = 0.0, timeout_s: float = TIMEOUT_S) -> Lease:
        """Take the lease, from a dead or silent holder if need be; a live holder is a LeaseError after `wait_s`."""
        path, deadline, silent_since = folder / "lease.json", time.monotonic() + wait_s, time.monotonic()
        last_seen: tuple | None = None
        while True:
            watching = False
            with _locked(folder):
                holder = read_holder(folder)
                alive = False if holder is None or holder.get("released") else _process_alive(holder)
                if holder is not None and _superseded(holder):
                    alive = False
                if holder is not None and alive is None:  # is the file still renewed, by our own clock?
                    seen = (holder["token"], path.stat().st_mtime_ns)
                    if last_seen is None:
                        log.warning(
                            (
                                "%s: held by process %s on %s, which cannot be checked from here; watching for %g s "
                                "whether it still writes"
                            ),
                            *(folder, holder["pid"], holder["host"], timeout_s),
                        )
                    watching = last_seen is None or seen == last_seen  # no sign of life yet
                    if seen != last_seen:
                        last_seen, silent_since = seen, time.monotonic()
                    alive = time.monotonic() - silent_since < timeout_s
                if not alive:
                    lease = cls(folder, uuid.uuid4().hex, (holder or {}).get("incarnation", 0) + 1)
                    lease._write()
                    break
            if holder is not None and not watching and time.monotonic() >= deadline:
                raise LeaseError(
                    f"{folder}: run directory is in use by process {holder['pid']} on {holder['host']}; "
                    "wait for it, stop it, or choose another --run folder"
                )
            time.sleep(min(1.0, RENEW_S / 5))
        lease._thread = threading.Thread(target=lease._renew, name="lease", daemon=True)
        lease._thread.start()
        return lease

    def _write(self) -> None:
        start = scheduler_start()
        write_json(
            self.folder / "lease.json",
            {
                "token": self.token,
                "incarnation": self.incarnation,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "place": _place(),
                "begun": _start_time(os.getpid()),
                **({"job": start[0], "restart": start[1]} if start else {}),
            },
        )

    def _renew(self) -> None:
        while not self._stop.wait(RENEW_S):
            with contextlib.suppress(OSError):
                if holds(self.folder, self.token):
                    os.utime(self.folder / "lease.json")

    def release(self) -> None:
        """Give the lease back, unless somebody has taken it over."""
        self._stop.set()
        with _locked(self.folder):
            holder = read_holder(self.folder)
            if holder and holder["token"] == self.token:
                write_json(self.folder / "lease.json", {**holder, "released": True})


def holds(folder: Path, token: str) -> bool:
    """Whether `token` is still the run directory's lease."""
    holder = read_holder(folder)
    return holder is not None and holder["token"] == token and not holder.get("released")


def require(folder: Path, token: str) -> None:
    """Stop a process whose lease was taken over, before it writes anything."""
    if not holds(folder, token):
        raise LeaseError(
            f"{folder}: this process no longer owns the run directory; a newer start of the run took it over"
        )
