"""Implementations in processes of their own: started ahead so that they import, let go one after the other."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Child:
    """One process. It reads a line before it begins, and prints its figures as JSON after the word RESULT."""

    def __init__(
        self, module: str, arguments: list[str], log: Path, path: Path | None = None, watch_memory: bool = True
    ) -> None:
        """`path` goes in front of its PYTHONPATH; asking for the memory in use costs a little of the machine's time."""
        self.command, self.log, self.watch_memory = [sys.executable, "-m", module, *arguments], log, watch_memory
        known = os.environ.get("PYTHONPATH")
        self.environment = os.environ | (
            {"PYTHONPATH": os.pathsep.join([str(path), *([known] if known else [])])} if path else {}
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Let it import; does nothing when it was started before."""
        # so that `finish` ends the processes it has started
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        if self.process is None:
            with open(self.log, "wb") as stream:
                pipes: dict = {"stdin": subprocess.PIPE, "stdout": stream, "stderr": subprocess.STDOUT}
                self.process = subprocess.Popen(self.command, env=self.environment, start_new_session=True, **pipes)

    def finish(self, timeout_s: float) -> dict[str, Any] | str:
        """Let it begin; its figures, or why there are none. Nothing of it is left afterwards."""
        assert self.process is not None and self.process.stdin is not None
        reason, peak, end = "", 0.0, time.monotonic() + timeout_s
        try:
            self.process.stdin.write(b"go\n")
            self.process.stdin.close()
            while self.process.poll() is None and not reason:
                if time.monotonic() > end:
                    reason = f"no result within {timeout_s:.0f} s\n"
                peak = max(peak, device_gib() if self.watch_memory else 0.0)
                time.sleep(0.5)
        except BrokenPipeError:
            reason = "it ended before it began\n"
        finally:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)  # vLLM's processes too
            except ProcessLookupError:
                pass
            self.process.wait(30)
        lines = self.log.read_text(errors="replace").splitlines()
        for line in lines:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT ")) | {"device_gib": peak}
        return reason + "\n".join(lines[-25:])


def wait_for_word() -> None:
    """The child's side: wait to begin; a parent that is gone never says so, and one that is killed later takes this
    process with it.
    """
    from ..core.process import die_with_parent

    die_with_parent(os.getppid())
    if not sys.stdin.readline():
        raise SystemExit("the benchmark ended before this implementation began")


def device_gib() -> float:
    """Memory of the first GPU in use by all processes; 0 where there is none."""
    if not shutil.which("nvidia-smi"):
        return 0.0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    found = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split()
    return float(found[0]) / 1024 if found and found[0].isdigit() else 0.0
