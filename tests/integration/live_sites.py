"""Two of the local sites served over http as sites elsewhere are, with their own state and logins, and an
OpenAI-compatible writer of instructions. Helper module, not a test.
"""

import hashlib
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from terrella.data.convert.webrl import step_sample, trajectory_steps
from terrella.data.schema import TEXT
from terrella.data.shards import ShardWriter
from terrella.rl.worlds.web.generate import SiteTask, make_site_tasks
from terrella.rl.worlds.web.http import Response, make_request
from terrella.rl.worlds.web.sites import SITES, SiteSet
from terrella.rl.worlds.web.tasks import expand
from terrella.rl.worlds.web.world import WebWorld

KEYS = ("gitlab", "reddit")
TEMPLATES = (407, 207)  # star a project, subscribe to a forum: both change their site
RESET = """
import os, sys, urllib.request
for pair in sys.argv[1:]:
    site, _, address = pair.partition("=")
    if site in os.environ["TERRELLA_SITES"].split(","):
        urllib.request.urlopen(address + "/reset", b"", 60)
"""


class _Server:
    """One http server of 127.0.0.1 in a thread; subclasses answer POST and GET by `answer`."""

    def __init__(self) -> None:
        outer, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            timeout = 60  # a connection that says nothing is dropped

            def do_GET(self) -> None:
                self._answer("")

            def do_POST(self) -> None:
                self._answer(self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode())

            def _answer(self, body: str) -> None:
                with lock:
                    response = outer.answer(self.command, self.path, body, self.headers.get("Cookie") or "")
                blob = response.body.encode()
                self.send_response(response.status)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Cache-Control", "no-store")
                self.send_header("Content-Length", str(len(blob)))
                if response.location:
                    self.send_header("Location", response.location)
                for name, value in response.cookies.items():
                    self.send_header("Set-Cookie", f"{name}={value}; Path=/; HttpOnly")
                self.end_headers()
                self.wfile.write(blob)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, method: str, path: str, body: str, cookie: str) -> Response:
        raise NotImplementedError

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class LiveSite(_Server):
    """A site that keeps what is done to it until somebody posts to /reset."""

    def __init__(self, key: str) -> None:
        self.key, self.site = key, SiteSet().sites[key]
        self.logins = self.resets = self.changes = 0
        super().__init__()

    def answer(self, method: str, path: str, body: str, cookie: str) -> Response:
        if path == "/reset":
            self.resets += 1
            self.site.reset()
            return Response("reset")
        cookies = {name: value for name, sign, value in (c.strip().partition("=") for c in cookie.split(";")) if sign}
        response = self.site.handle(make_request(method, f"{self.site.base}{path}", body, cookies))
        self.logins += bool(response.cookies)
        self.changes += method == "POST" and path != "/login"
        return response


class Writer(_Server):
    """Writes instructions in the words of the sites' own tasks, some that cannot be done; the same answer to the same
    request.
    """

    def __init__(self, tasks: list[SiteTask]) -> None:
        self.intents = {key: [t.task.intent for t in tasks if t.task.sites == (key,)] for key in KEYS}
        self.written = self.refused = 0
        super().__init__()

    def answer(self, method: str, path: str, body: str, cookie: str) -> Response:
        asked = json.loads(body)["messages"][-1]["content"]
        text = self._feasible(asked) if "Can this task be done" in asked else self._write(asked)
        return Response(json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}))

    def _feasible(self, asked: str) -> str:
        impossible = "`Delete " in asked
        self.refused += impossible
        return f"As the page says. [{'NO' if impossible else 'YES'}]"

    def _write(self, asked: str) -> str:
        self.written += 1
        key = next(k for k in KEYS if f"({k})" in asked)
        shown = set(re.findall(r"`([^`]+)`", asked))
        new = [t for t in self.intents[key] if t not in shown]
        new.sort(key=lambda text: hashlib.blake2b((asked + text).encode()).digest())
        return "Here you are:\n" + "\n".join(f"- `{text}`" for text in [f"Delete everything on {key}.", *new[:6]])


def site_tasks() -> list[SiteTask]:
    """The tasks of the two templates, with the oracle's steps."""
    return [t for t in make_site_tasks(0, KEYS) if t.task.template_id in TEMPLATES]


def write_task_file(path: Path, tasks: list[SiteTask]) -> None:
    """Tasks in WebArena's format, with placeholders for addresses."""
    places = {SiteSet().sites[key].base: f"__{key.upper()}__" for key in KEYS}
    path.write_text(json.dumps([expand(dict(t.task.raw), places) for t in tasks]))


def write_demonstrations(folder: Path, tasks: list[SiteTask], config: dict[str, Any]) -> int:
    """What the oracles do, as shards that `terrella shards make webrl` would make of their traces: how many steps."""
    world, count = WebWorld(sites=KEYS, boxes=False, max_steps=config["max_steps"]), 0
    with ShardWriter(folder, kind=TEXT) as writer:
        for task in tasks:
            world.open_task(task.task, task.steps)
            rows = []
            while not world.done:
                rows.append({"html": world.html, "response": world.demonstrate().split("\n")[-1]})
                world.step(rows[-1]["response"])
            assert world.score == 1.0, task.task.intent
            rows[0]["target"] = task.task.intent
            for i, record in enumerate(trajectory_steps(rows, world.score)):
                writer.write(step_sample(record, task.task.task_id, i), key=f"{task.task.task_id}-{i:04d}")
            count += len(rows)
    return count


def tag_file(path: Path, sites: dict[str, LiveSite], limits: dict[str, Any]) -> None:
    """Tags of the task files train.json and test.json beside `path`: one episode at a time on a site, which is reset
    before the next, and logins by form with credentials of the environment.
    """
    addresses = {key: site.address for key, site in sites.items()}
    forms = {
        key: {"url": f"{address}/login", "user_variable": "SITE_USER", "password_variable": "SITE_PASSWORD"}
        for key, address in addresses.items()
        if SITES[key].needs_login
    }
    reset = [sys.executable, "-S", "-c", RESET, *(f"{key}={address}" for key, address in addresses.items())]
    common = {
        "source": "file",
        "backend": "chromium",
        "dialect": "lite",
        "boxes": False,
        "addresses": {f"__{key.upper()}__": address for key, address in addresses.items()},
        "logins": forms,
        "reset_command": reset,
        "reset_phase_command": reset,
        "at_once_per_site": 1,
        "deadline_s": 60.0,
        **limits,
    }
    tags = {}
    for tag, file in (("LiveTrain", "train.json"), ("LiveTest", "test.json")):
        tags[tag] = {"world": "web", "config": {**common, "tasks_file": str(path.parent / file)}}
    path.write_text(json.dumps(tags))  # JSON is YAML
