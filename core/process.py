"""Processes that belong to another one, the cores that they may use, and work that must end in time."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

PARENT_VARIABLE = "TERRELLA_PARENT"  # process id of the supervisor, for its workers
CORES_VARIABLE = "TERRELLA_CORES"  # what a rank might use before it was kept beside its GPU, for what it starts


def die_with_parent(parent: int) -> None:
    """Ask the kernel to end this process when `parent`, which started it, is killed, so that no orphan goes on.

    The starter passes its own id: in a container it may be 1, so that number does not show who is an orphan.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel was asked
            os._exit(1)


def end_group_with(parent: int) -> None:
    """End this process's whole group when `parent` or the process itself is gone. A killed process cannot end its
    children, and the kernel's signal (`die_with_parent`) reaches no grandchild; so a process of its own watches.
    """
    if sys.platform != "linux":
        return
    group, watched = os.getpgrp(), [os.pidfd_open(pid) for pid in (parent, os.getpid())]
    if os.fork():
        for descriptor in watched:
            os.close(descriptor)
        return
    os.setsid()  # out of the group that it ends
    select.select(watched, [], [])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    os._exit(0)


def end_with(pid: int) -> None:
    """Kill this process when another one is gone, whoever started it; a thread waits for that."""
    if sys.platform != "linux":
        return
    other = os.pidfd_open(pid)

    def wait() -> None:
        select.select([other], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True, name=f"end-with-{pid}").start()


@contextlib.contextmanager
def unwind_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process as Ctrl-C does, through every `finally`, so that nothing unfinished is left."""

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not cut the cleaning short
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def usable_cores() -> int:
    """How many cores this process may run on: a batch job has fewer than its machine."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def keep_near(place: str, devices: Path = Path("/sys/bus/pci/devices")) -> str:
    """Keep this process on the cores of a GPU's side of the machine (the NUMA node), as far as it may use them.
    `place` is the GPU's PCI address; returns what was done, for the log.
    """
    try:
        near = parse_cores((devices / place / "local_cpulist").read_text())
    except OSError:
        return f"GPU {place}: this machine does not tell which cores are near it"
    allowed = os.sched_getaffinity(0)
    if not near & allowed or near >= allowed:
        return f"GPU {place}: all {len(allowed)} cores that this process may use stay in use"
    os.environ.setdefault(CORES_VARIABLE, ",".join(map(str, sorted(allowed))))
    os.sched_setaffinity(0, near & allowed)
    return f"GPU {place}: kept on the {len(near & allowed)} cores near it, of {len(allowed)}"


def use_all_cores() -> None:
    """Undo `keep_near` in a process that a rank started for other GPUs."""
    if CORES_VARIABLE in os.environ:
        os.sched_setaffinity(0, parse_cores(os.environ.pop(CORES_VARIABLE)))


def pci_address(gpu: int) -> str:
    """Where a GPU, by CUDA's number, is plugged in, as Linux writes it; empty where the driver does not say."""
    name = ctypes.create_string_buffer(32)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    failed = cuda.cuInit(0) or cuda.cuDeviceGetPCIBusId(name, len(name), gpu)
    return "" if failed else name.value.decode().lower()


def parse_cores(text: str) -> set[int]:
    """Linux' list of cores, such as 0-3,8."""
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return {core for low, _, high in ends for core in range(int(low), int(high or low) + 1)}


def usable_memory() -> int:
    """Bytes of memory that are free for this process: of the machine, or less in a container with a limit."""
    import psutil

    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no such limit, or "max"
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(stat.get("file", 0)))  # files in memory make room
    return max(free, 0)


@contextlib.contextmanager
def alarm(limit_s: float) -> Iterator[None]:
    """Raise TimeoutError in Python code that has not ended after so long. Signals reach the main thread alone:
    others are not limited.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def late(*_: object) -> None:
        raise TimeoutError(f"did not end within {limit_s:g} s")

    begun, before = time.monotonic(), signal.signal(signal.SIGALRM, late)
    other, _ = signal.setitimer(signal.ITIMER_REAL, limit_s)  # somebody else's timer goes on afterwards
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, max(other - (time.monotonic() - begun), 1e-3) if other else 0.0)
        signal.signal(signal.SIGALRM, before)
