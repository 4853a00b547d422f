"""Child processes that must not outlive their parent, the cores a process may use, and code with a time limit."""

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
CORES_VARIABLE = "TERRELLA_CORES"  # cores of a rank before it was pinned near its GPU, for processes it starts


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when `parent`, which started it, dies.

    The parent passes its own id: in a container it may be 1, so a parent id of 1 does not mean orphaned.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call above
            os._exit(1)


def end_group_with(parent: int) -> None:
    """Kill this process's whole group when `parent` or this process dies. A killed process cannot end its children, and
    `die_with_parent` does not reach grandchildren, so a separate process watches.
    """
    if sys.platform != "linux":
        return
    group, watched = os.getpgrp(), [os.pidfd_open(pid) for pid in (parent, os.getpid())]
    if os.fork():
        for descriptor in watched:
            os.close(descriptor)
        return
    os.setsid()  # leave the group that it will kill
    select.select(watched, [], [])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    os._exit(0)


def end_with(pid: int) -> None:
    """Kill this process when another one dies, whoever started it; a thread waits for that."""
    if sys.platform != "linux":
        return
    other = os.pidfd_open(pid)

    def wait() -> None:
        select.select([other], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True, name=f"end-with-{pid}").start()


@contextlib.contextmanager
def unwind_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process like Ctrl-C, through every `finally`, so that nothing unfinished is left behind."""

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the cleanup
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def usable_cores() -> int:
    """How many cores this process may run on: a batch job may have fewer than the machine."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def keep_near(place: str, devices: Path = Path("/sys/bus/pci/devices")) -> str:
    """Pin this process to the allowed cores of a GPU's NUMA node. `place` is the GPU's PCI address; returns a line for
    the log.
    """
    try:
        near = parse_cores((devices / place / "local_cpulist").read_text())
    except OSError:
        return f"GPU {place}: this machine does not say which cores are near it"
    allowed = os.sched_getaffinity(0)
    if not near & allowed or near >= allowed:
        return f"GPU {place}: not pinned, all {len(allowed)} allowed cores stay in use"
    os.environ.setdefault(CORES_VARIABLE, ",".join(map(str, sorted(allowed))))
    os.sched_setaffinity(0, near & allowed)
    return f"GPU {place}: pinned to the {len(near & allowed)} cores near it, of {len(allowed)}"


def use_all_cores() -> None:
    """Undo `keep_near`, in a process that a rank starts for other GPUs."""
    if CORES_VARIABLE in os.environ:
        os.sched_setaffinity(0, parse_cores(os.environ.pop(CORES_VARIABLE)))


def pci_address(gpu: int) -> str:
    """The PCI address of a GPU, by CUDA's number, as Linux writes it; empty where the driver does not say."""
    name = ctypes.create_string_buffer(32)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    failed = cuda.cuInit(0) or cuda.cuDeviceGetPCIBusId(name, len(name), gpu)
    return "" if failed else name.value.decode().lower()


def parse_cores(text: str) -> set[int]:
    """Parse a Linux list of cores, such as 0-3,8."""
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return {core for low, _, high in ends for core in range(int(low), int(high or low) + 1)}


def usable_memory() -> int:
    """Bytes of memory available to this process: the machine's, or less in a container with a limit."""
    import psutil

    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no limit, or "max"
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(stat.get("file", 0)))  # cached files can be evicted
    return max(free, 0)


@contextlib.contextmanager
def alarm(limit_s: float) -> Iterator[None]:
    """Raise TimeoutError in Python code that runs longer than this. Only the main thread receives signals, so code in
    other threads is not limited.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def late(*_: object) -> None:
        raise TimeoutError(f"did not end within {limit_s:g} s")

    begun, before = time.monotonic(), signal.signal(signal.SIGALRM, late)
    other, _ = signal.setitimer(signal.ITIMER_REAL, limit_s)  # an outer timer continues afterwards
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, max(other - (time.monotonic() - begun), 1e-3) if other else 0.0)
        signal.signal(signal.SIGALRM, before)
