"""One Chromium of a thread: how it is launched, what it may connect to, and how calls into it end by a deadline.

Playwright is imported here and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ..base import WorldFault
from .backend import Limits
from .http import SiteServer

log = logging.getLogger(__name__)
_shared = threading.local()  # Playwright's plain interface belongs to the thread that started it
_unsandboxed: dict[str, str] = {}  # browser -> why its sandbox cannot work here
LAUNCH_S = 60.0
CLOSE_S = 10.0
HEAP_MB = 1024  # of JavaScript, in one page: one that asks for more ends its own renderer, not the machine


def find_chromium(path: str = "") -> str:
    """The browser's path: the setting, or the system's."""
    found = path or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not found:
        raise WorldFault("web: no Chromium was found; install it, set `browser` to its path, or use backend: dom")
    return found


def _arguments(limits: Limits, server: SiteServer | None) -> list[str]:
    """Chromium's own network stack keeps the allow-list: what is not on it, redirects and WebSockets too, is sent to a
    proxy that does not exist. Other names do not resolve either."""
    names = {host.partition(":")[0] for host in limits.hosts}
    rules = [f"MAP *.test 127.0.0.1:{server.port}", "MAP * ~NOTFOUND"] if server else ["MAP * ~NOTFOUND"]
    kept = [] if server else [f"EXCLUDE {name}" for name in sorted(names)]
    return [
        "--disable-gpu",
        "--in-process-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        f"--js-flags=--max-old-space-size={HEAP_MB}",
        f"--host-resolver-rules={', '.join([*rules, *kept])}",
        "--proxy-server=http://not-allowed.invalid:1",
        f"--proxy-bypass-list={';'.join(['<-loopback>', *limits.origins()])}",
        "--webrtc-ip-handling-policy=disable_non_proxied_udp",
        "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",  # the same, before Chromium 120 or so
    ]


def _launch(path: str, arguments: list[str], timeout_s: float) -> Any:
    """The browser, in its sandbox where that can work; where it cannot, a warning says why, once."""
    if path not in _unsandboxed and hasattr(os, "geteuid") and os.geteuid() == 0:
        _unsandboxed[path] = "Chromium has none for the user root; start the program as another user"
        log.warning("web: Chromium runs without its sandbox: %s", _unsandboxed[path])
    limit_ms = 1000 * max(LAUNCH_S, timeout_s)
    start = functools.partial(_shared.tool.chromium.launch, executable_path=path, args=arguments, timeout=limit_ms)
    if path in _unsandboxed:
        return start(chromium_sandbox=False)
    try:
        return start(chromium_sandbox=True)
    except Exception as error:
        if "sandboxing failed" not in str(error):
            raise
        browser = start(chromium_sandbox=False)
        _unsandboxed[path] = "this machine allows no user namespaces (containers often do not)"
        log.warning("web: Chromium runs without its sandbox: %s", _unsandboxed[path])
        return browser


class Browser:
    """One Chromium of one thread, with the port of its local sites."""

    def __init__(self, path: str, limits: Limits, local: bool) -> None:
        try:
            from playwright.sync_api import sync_playwright
        except ImportError as error:
            wanted = "install the extra `web`, or use backend: dom"
            raise WorldFault(f"web: the package playwright is missing; {wanted}") from error
        if not hasattr(_shared, "tool"):
            _shared.tool, _shared.browsers = sync_playwright().start(), {}
        self.users = 0
        self.server = SiteServer() if local else None
        self.browser = _launch(path, _arguments(limits, self.server), limits.deadline_s)
        processes = self.browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
        self.pid = next(process["id"] for process in processes if process["type"] == "browser")

    @property
    def connected(self) -> bool:
        """Whether the browser is still there."""
        return self.browser.is_connected()

    def kill(self) -> None:
        """End the browser at once: calls into it then return with an error."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    @contextlib.contextmanager
    def watch(self, limit_s: float, late: Callable[[], None]) -> Iterator[None]:
        """Calls into the browser end: at the limit `late` is run; where that does not help, the browser is killed at
        twice it.

        Playwright's loop runs on this thread while a call waits, so its timers reach a call that never returns.
        """
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(limit_s, _aside, late), loop.call_later(2 * limit_s, self.kill)]
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()

    def close(self) -> None:
        """End the browser and its local sites."""
        try:
            if self.connected:
                with self.watch(CLOSE_S, self.kill):
                    self.browser.close()
        finally:
            if self.server is not None:
                self.server.close()


def _aside(work: Callable[[], None]) -> None:
    """Run work that calls Playwright from a timer, as Playwright runs its event handlers: in a greenlet of its own."""
    from greenlet import greenlet

    greenlet(work).switch()


def acquire(path: str, limits: Limits, local: bool) -> tuple[Any, Browser]:
    """The thread's browser for these hosts, started if there is none, and the key to give it back with."""
    key = (path, limits.hosts, local)
    browsers = getattr(_shared, "browsers", {})
    if key not in browsers or not browsers[key].connected:
        made = Browser(path, limits, local)
        _shared.browsers[key] = made
    _shared.browsers[key].users += 1
    return key, _shared.browsers[key]


def release(key: Any, browser: Browser) -> None:
    """Give a browser back; the last user's ends it."""
    browser.users -= 1
    if browser.users:
        return
    if _shared.browsers.get(key) is browser:  # not a newer one that took the place of a dead one
        del _shared.browsers[key]
    browser.close()
    if not _shared.browsers:
        _shared.tool.stop()
        del _shared.tool, _shared.browsers
