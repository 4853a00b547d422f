"""Run a command; when it ends, name and kill whatever it left running, so that nothing slows what comes next.

python tests/reap.py COMMAND ARGUMENT ...
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
PATIENCE_S = 10.0  # for what is about to end by itself


def is_running(pid: int) -> bool:
    """Whether a process goes on; one that has ended and was not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def left_over() -> list[tuple[int, str]]:
    """This process's children; a process whose parent has ended becomes one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z":
            found.append((int(folder.name), words[:120]))
    return found


def reap() -> None:
    """Collect children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def main() -> int:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    command = subprocess.Popen(sys.argv[1:])
    # orphans become this process's children: those that end are collected at once, or tests would see them as zombies
    while (ended := os.waitpid(-1, 0))[0] != command.pid:
        pass
    code = os.waitstatus_to_exitcode(ended[1])
    deadline = time.monotonic() + PATIENCE_S
    while left_over() and time.monotonic() < deadline:
        time.sleep(0.5)
        reap()
    for _ in range(100):  # a child's own children become ours when it has ended
        if not (left := left_over()):
            break
        for number, words in left:
            print(f"left running, now killed: {words}", flush=True)
            os.kill(number, signal.SIGKILL)
        time.sleep(0.2)
        reap()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
