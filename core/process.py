"""Processes that belong to another one."""

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
