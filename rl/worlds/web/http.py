"""Requests and responses of the local sites: called directly by the page model, or served on 127.0.0.1 for a
browser.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

LARGEST_FORM = 1_000_000


@dataclass(frozen=True)
class Request:
    """One request. `query` and `form` keep the last value of a name."""

    method: str
    url: str
    query: dict[str, str] = field(default_factory=dict)
    form: dict[str, str] = field(default_factory=dict)
    cookies: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return urlsplit(self.url).path or "/"

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""


@dataclass(frozen=True)
class Response:
    """One response; a location makes it a redirect."""

    body: str = ""
    status: int = 200
    location: str = ""
    cookies: dict[str, str] = field(default_factory=dict)


Fetch = Callable[[Request], Response]


def make_request(method: str, url: str, body: str = "", cookies: dict[str, str] | None = None) -> Request:
    """A request with its query and form taken apart."""
    query = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    return Request(method, url, query, dict(parse_qsl(body, keep_blank_values=True)), cookies or {})


WORLD_HEADER = "X-Terrella-World"  # which world's state a browser context talks to


@dataclass
class Slow:
    """Sites that take their time for an answer, log-normal between two percentiles (the 5th and the 95th, in
    milliseconds). The requests of a task take the same times whenever it is played.
    """

    fetch: Fetch
    low_ms: float
    high_ms: float
    task: str = ""
    asked: int = 0

    def begin(self, task: str) -> None:
        """A task begins anew."""
        self.task, self.asked = task, 0

    def __call__(self, request: Request) -> Response:
        self.asked += 1
        low, high = math.log(self.low_ms), math.log(self.high_ms)
        drawn = random.Random(f"{self.task} {self.asked}").gauss((low + high) / 2, (high - low) / (2 * 1.645))
        time.sleep(math.exp(drawn) / 1000)
        return self.fetch(request)


class SiteServer:
    """All local sites of a process on one port of 127.0.0.1; the Host header names the site, a header of the context
    the world.
    """

    def __init__(self) -> None:
        self.worlds: dict[str, Fetch] = {}
        lock = threading.Lock()
        worlds = self.worlds

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30  # a connection that says nothing is dropped

            def do_GET(self) -> None:
                self.answer("")

            def do_POST(self) -> None:
                length = min(int(self.headers.get("Content-Length") or 0), LARGEST_FORM)
                self.answer(self.rfile.read(length).decode("utf-8", "replace"))

            def answer(self, body: str) -> None:
                fetch = worlds.get(self.headers.get(WORLD_HEADER, ""))
                parts = [c.strip().partition("=") for c in (self.headers.get("Cookie") or "").split(";")]
                cookies = {name: value for name, sign, value in parts if sign}
                host = (self.headers.get("Host") or "").partition(":")[0]
                if fetch is None:
                    response = Response("<html><body>No such world.</body></html>", 404)
                else:
                    with lock:
                        response = fetch(make_request(self.command, f"http://{host}{self.path}", body, cookies))
                blob = response.body.encode()
                self.send_response(response.status)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Cache-Control", "no-store")  # going back asks again, as the page model does
                self.send_header("Content-Length", str(len(blob)))
                if response.location:
                    self.send_header("Location", response.location)
                for name, value in response.cookies.items():
                    self.send_header("Set-Cookie", f"{name}={value}; Path=/; HttpOnly; SameSite=Lax")
                self.end_headers()
                self.wfile.write(blob)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.thread.start()

    @property
    def port(self) -> int:
        return self.server.server_address[1]

    def close(self) -> None:
        """Stop serving."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(5)
