"""Processes that belong to another one, and the cores that they may use."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "TERRELLA_PARENT"  # process id of the supervisor, for its workers


def die_with_parent(parent: int) -> None:
    """Ask the kernel to end this process when `parent`, which started it, is killed, so that no orphan goes on.

    The starter passes its own id: in a container it may be 1, so an orphan cannot be told by that number.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel was asked
            os._exit(1)


def usable_cores() -> int:
    """How many cores this process may run on: a batch job has fewer than its machine."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
