"""Processes that belong to another one, and the cores that they may use."""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def die_with_parent() -> None:
    """Ask the kernel to end this process when the one that started it is killed, so that no orphan goes on."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
        if os.getppid() == 1:
            os._exit(1)


def usable_cores() -> int:
    """How many cores this process may run on: a batch job has fewer than its machine."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
