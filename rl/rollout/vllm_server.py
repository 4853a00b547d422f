"""A vLLM server process that we own: started, awaited with a deadline, watched, and ended with all its children.

The server is OpenAI-compatible; token ids go in and out through /v1/completions, weights through /collective_rpc.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ...core.errors import DeadlineError, WorkerError
from ...core.http import fetch
from ...core.ports import free_port
from ...core.process import die_with_parent, end_group_with, use_all_cores
from .server_auth import GUARD, KEY_VARIABLE
from .vllm_config import VllmSettings, use_newest_runner


class VllmServer:
    """One server. `environment` adds to ours, e.g. CUDA_VISIBLE_DEVICES."""

    def __init__(
        self,
        settings: VllmSettings,
        log: Path,
        *,
        host: str = "127.0.0.1",
        environment: Mapping[str, str] | None = None,
        start_s: float = 600.0,
    ) -> None:
        self.settings, self.log, self.host, self.start_s = settings, Path(log), host, start_s
        self.environment = dict(environment or {})
        self.port = free_port()
        self.key = secrets.token_hex(32)  # of this start of the run; the trainer sends it with every request
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self) -> None:
        """Start the process, always at the same address; `wait` returns when it serves."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        arguments = [sys.executable, "-m", __name__, str(os.getpid()), "--host", self.host, "--port", str(self.port)]
        arguments += ["--middleware", GUARD, *command_line(self.settings)]
        environment = {
            **os.environ,
            "VLLM_SERVER_DEV_MODE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            KEY_VARIABLE: self.key,
            **self.environment,
        }
        with open(self.log, "ab") as stream:
            self.process = subprocess.Popen(
                arguments, stdout=stream, stderr=stream, env=environment, start_new_session=True
            )

    def wait(self) -> None:
        """Wait until the server answers; if it dies or the deadline passes, the error shows the end of its log."""
        end = time.monotonic() + self.start_s
        while not self.healthy():
            if not self.alive():
                raise WorkerError(f"vllm server at {self.url} died while starting; {self.log} ends:\n{self.tail()}")
            if time.monotonic() > end:
                self.stop()
                raise DeadlineError(
                    f"vllm server at {self.url} did not answer within {self.start_s:.0f} s; {self.log} "
                    f"ends:\n{self.tail()}"
                )
            time.sleep(0.2)

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def healthy(self, timeout_s: float = 5.0) -> bool:
        """Whether /health answers, which includes the engine behind the server."""
        try:
            fetch(f"{self.url}/health", timeout_s)
        except OSError:
            return False
        return True

    def stop(self) -> None:
        """End the process and its children: SIGTERM first, then SIGKILL."""
        if self.process is None:
            return
        for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(patience)
            except (ProcessLookupError, PermissionError):
                break
            except subprocess.TimeoutExpired:
                continue
        kill_group(self.process.pid)
        self.process = None

    def tail(self, lines: int = 15) -> str:
        """The last lines of the log."""
        try:
            return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
        except OSError as error:
            return f"({error})"


def kill_group(group: int, patience_s: float = 10.0) -> None:
    """Wait until no process of a group is left, and kill what remains."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(0.05)


def command_line(settings: VllmSettings) -> list[str]:
    """The engine's settings as the server's options."""
    options: list[str] = []
    for name, value in settings.engine_arguments().items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            options += [option] if value else []
        else:
            options += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return options


def main() -> None:
    """Run the server, and die with the process that asked for it; engines and workers of the server do too."""
    parent = int(sys.argv.pop(1))
    die_with_parent(parent)
    end_group_with(parent)
    use_all_cores()  # its GPUs are not those of the rank that started it
    import runpy

    use_newest_runner("--enable-return-routed-experts" in sys.argv)
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
