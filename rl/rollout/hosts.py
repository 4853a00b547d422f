"""vLLM servers on machines of their own. A host process on each such machine starts servers when the trainer asks.

Addresses belong to one start of a job, not to a run's settings: every host writes its address to a folder that the
trainer reads, so that a run can be restarted on other machines with the same settings. A host's servers end with it.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, DeadlineError, WorkerError
from ...core.files import make_folder, read_json, write_json
from ...core.http import fetch
from .vllm_config import VllmSettings
from .vllm_server import VllmServer

VARIABLE = "TERRELLA_SAMPLER_HOSTS"  # FOLDER:COUNT: the folder, and how many hosts write their addresses to it
ANSWER_S = 60.0


@dataclass(frozen=True)
class HostAddress:
    """Where a host listens, and how many GPUs it has for servers."""

    url: str
    token: str  # whoever knows it may start servers there; only its owner can read the folder of addresses
    gpus: int

    def ask(self, path: str, body: dict[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Send one request; WorkerError if the host does not answer."""
        try:
            return json.loads(fetch(f"{self.url}{path}", timeout_s, body, {"Authorization": self.token}))
        except (OSError, ValueError) as error:
            raise WorkerError(f"sampler host {self.url}{path}: {type(error).__name__}: {error}") from error


class Host:
    """The host's side: a service that starts, restarts and ends vLLM servers here. The thread that calls `serve`
    handles requests one by one, because a server dies with the thread that started it.
    """

    def __init__(self, name: str | None = None, gpus: int = 0) -> None:
        self.name, self.servers = name or socket.gethostname(), dict[str, VllmServer]()
        self.work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.web = ThreadingHTTPServer(("", 0), self._handler())
        self.address = HostAddress(f"http://{self.name}:{self.web.server_address[1]}", secrets.token_hex(16), gpus)

    def announce(self, folder: Path) -> None:
        """Write the address where the trainer looks for it."""
        make_folder(folder).chmod(0o700)
        write_json(folder / f"{self.name}-{os.getpid()}.json", asdict(self.address))

    def serve(self) -> None:
        """Handle requests until `stop` is called."""
        threading.Thread(target=self.web.serve_forever, daemon=True).start()
        try:
            while task := self.work.get():
                task()
        finally:
            self.web.shutdown()
            for server in self.servers.values():
                server.stop()

    def stop(self) -> None:
        self.work.put(None)

    def place(
        self, name: str, settings: dict[str, Any], log: str, environment: dict[str, str], start_s: float
    ) -> dict[str, Any]:
        """Assign an address to a server, which it keeps across restarts."""
        if name in self.servers:
            self.servers[name].stop()
        server = VllmServer(
            VllmSettings(**settings), Path(log), host=self.name, environment=environment, start_s=start_s
        )
        self.servers[name] = server
        return {"url": server.url, "key": server.key}

    def start(self, name: str) -> dict[str, Any]:
        self.servers[name].start()
        return {}

    def end(self, name: str) -> dict[str, Any]:
        self.servers[name].stop()
        return {}

    def state(self, name: str) -> dict[str, Any]:
        return {"alive": self.servers[name].alive()}

    def _do(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Pass a call to the serving thread and wait for its result."""
        call = {"/place": self.place, "/start": self.start, "/end": self.end, "/state": self.state}[path]
        done: Future[dict[str, Any]] = Future()

        def task() -> None:
            try:
                done.set_result(call(**body))
            except Exception as error:
                done.set_exception(error)

        self.work.put(task)
        return done.result(ANSWER_S)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        host = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                if not hmac.compare_digest(self.headers.get("Authorization", "").encode(), host.address.token.encode()):
                    self.send_error(403)
                    return
                try:
                    answer = json.dumps(
                        host._do(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                    ).encode()
                except Exception as error:
                    self.send_error(500, f"{type(error).__name__}: {error}"[:300].replace("\n", " "))
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


class HostedServer(VllmServer):
    """The trainer's side: a server on another machine, handled like a local one."""

    def __init__(
        self, place: HostAddress, name: str, settings: VllmSettings, log: Path, device: str, start_s: float
    ) -> None:
        self.place, self.name, self.settings, self.log, self.start_s = place, name, settings, log, start_s
        environment = {"CUDA_VISIBLE_DEVICES": device} if device else {}
        asked = {
            "name": name,
            "settings": asdict(settings),
            "log": str(log),
            "environment": environment,
            "start_s": start_s,
        }
        answer = place.ask("/place", asked)
        self.address, self.key = answer["url"], answer["key"]

    @property
    def url(self) -> str:
        return self.address

    def start(self) -> None:
        self.place.ask("/start", {"name": self.name})

    def alive(self) -> bool:
        try:
            return bool(self.place.ask("/state", {"name": self.name})["alive"])
        except WorkerError:
            return False

    def stop(self) -> None:
        with contextlib.suppress(WorkerError):  # a dead host has taken its servers along
            self.place.ask("/end", {"name": self.name})


def find_hosts(place: str, timeout_s: float) -> list[HostAddress]:
    """Wait until all hosts of this start have written their addresses."""
    folder, _, count = place.rpartition(":")
    if not folder or not count.isdigit() or not int(count):
        raise ConfigError(f"{VARIABLE}: '{place}' must be FOLDER:COUNT")
    end = time.monotonic() + timeout_s
    while True:
        found = [read_json(path) for path in sorted(Path(folder).glob("*.json"))]
        if len(found) >= int(count):
            return [HostAddress(**address) for address in found]
        if time.monotonic() > end:
            raise DeadlineError(
                f"{len(found)} of {count} sampler hosts wrote their address to {folder} within {timeout_s:.0f} s; "
                "the job's log shows what happened to the others"
            )
        time.sleep(0.2)


def hosted_servers(
    hosts: list[HostAddress], settings: VllmSettings, shares: list[tuple[str, int]], folder: Path, start_s: float
) -> list[HostedServer]:
    """One server for every `settings.tensor` GPUs of every host; on a host without GPUs one for each of `shares`: its
    devices, and over how many it shares its model.
    """
    servers = []
    for number, host in enumerate(hosts):
        if host.gpus and host.gpus < settings.tensor:
            raise ConfigError(
                f"sampler.tensor: {settings.tensor} is more than the {host.gpus} GPUs of sampler host {host.url}"
            )
        size = settings.tensor
        dealt = [(",".join(str(slot * size + i) for i in range(size)), size) for slot in range(host.gpus // size)]
        for slot, (device, tensor) in enumerate(dealt if host.gpus else shares):
            log, name = folder.absolute() / f"vllm-{number}-{slot}.log", f"{folder.parent.name}-{slot}"
            servers.append(HostedServer(host, name, replace(settings, tensor=tensor), log, device, start_s))
    return servers
