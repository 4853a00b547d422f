"""Chromium through Playwright: the backend of record. The only file of the web worlds that imports Playwright."""

from __future__ import annotations

import functools
import json
import re
import secrets
import shutil
import threading
import time
from importlib import resources
from typing import Any

from ..base import WorldFault
from .actions import WebAction
from .backend import ActionFailed, Limits, Start, check_allowed, check_target, fault, option_position
from .elements import Element, Page, from_snapshot
from .http import WORLD_HEADER, Fetch, SiteServer

_shared = threading.local()  # Playwright's plain interface belongs to the thread that started it
_KEYS = re.compile(r"(?:(?:Control|Shift|Alt|Meta|ctrl|cmd)\+)*[\w-]{1,20}", re.IGNORECASE)
_CENTRE = """(s, i) => { const e = s.elements[i]; if (!e || !e.isConnected) return null;
  for (const r of e.getClientRects()) {
    const l = Math.max(0, r.left), t = Math.max(0, r.top), x = Math.min(innerWidth, r.right), y = Math.min(innerHeight, r.bottom);
    if (x - l > 0 && y - t > 0) return [(l + x) / 2, (t + y) / 2]; } return null; }"""
_QUIET = "ms => new Promise(done => setTimeout(() => requestAnimationFrame(() => done(true)), ms))"
_MARK = """b => { const d = document.createElement('div'); d.id = 'terrella-mark';
  d.style.cssText = `position:fixed;left:${b[0] - 3}px;top:${b[1] - 3}px;width:${b[2] + 6}px;height:${b[3] + 6}px;box-sizing:border-box;` +
    'border:3px solid #d9480f;border-radius:4px;background:rgba(217,72,15,.15);z-index:2147483647;pointer-events:none';
  document.documentElement.appendChild(d); }"""
_UNMARK = "() => { const d = document.getElementById('terrella-mark'); if (d) d.remove(); }"


def find_chromium(path: str = "") -> str:
    """The browser's path: the setting, or the system's."""
    found = path or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not found:
        raise WorldFault("web: no Chromium was found; install it, set `browser` to its path, or use backend: dom")
    return found


@functools.cache
def _script(probe: str) -> str:
    text = (resources.files(__package__ or "terrella.rl.worlds.web") / "snapshot.js").read_text(encoding="utf-8")
    return text[text.index("async (options) =>") :].replace("PROBE", probe)


class _Process:
    """One Chromium of one thread, with the port of its local sites."""

    def __init__(self, path: str, hosts: frozenset[str], local: bool, timeout_s: float) -> None:
        try:
            from playwright.sync_api import sync_playwright
        except ImportError as error:
            raise WorldFault("web: the package playwright is missing; install the extra `web`, or use backend: dom") from error
        if not hasattr(_shared, "tool"):
            _shared.tool, _shared.browsers = sync_playwright().start(), {}
        self.users = 0
        self.server = SiteServer() if local else None
        # Names outside the list do not resolve, so that a redirect cannot leave it either; the request filter of a context comes on top.
        kept = [f"EXCLUDE {host.partition(':')[0]}" for host in sorted(hosts) if not local]
        rules = [f"MAP *.test 127.0.0.1:{self.server.port}"] if self.server else []
        arguments = [
            "--no-sandbox", "--disable-gpu", "--in-process-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking",
            f"--host-resolver-rules={', '.join([*rules, 'MAP * ~NOTFOUND', *kept])}",
        ]  # fmt: skip
        self.browser = _shared.tool.chromium.launch(executable_path=path, args=arguments, timeout=max(60.0, timeout_s) * 1000)

    def close(self) -> None:
        try:
            if self.browser.is_connected():
                self.browser.close()
        finally:
            if self.server is not None:
                self.server.close()


def _acquire(path: str, limits: Limits, local: bool) -> tuple[Any, _Process]:
    key = (path, limits.hosts, local)
    browsers = getattr(_shared, "browsers", {})
    if key not in browsers or not browsers[key].browser.is_connected():
        made = _Process(path, limits.hosts, local, limits.deadline_s)
        _shared.browsers[key] = made
    process = _shared.browsers[key]
    process.users += 1
    return key, process


def _release(key: Any, process: _Process) -> None:
    process.users -= 1
    if process.users:
        return
    if _shared.browsers.get(key) is process:  # not a newer one that took the place of a dead one
        del _shared.browsers[key]
    process.close()
    if not _shared.browsers:
        _shared.tool.stop()
        del _shared.tool, _shared.browsers


class ChromiumBackend:
    """A context of its own in a Chromium that the worlds of a thread share. `fetch` gives the local sites; None for pages elsewhere.

    With `live` an action meets its element where it is then; without, where it was when the page was looked at, which saves the browser
    two of the four questions of a step and is enough for pages that stay as they are between steps.
    """

    has_layout = True

    def __init__(
        self, limits: Limits, fetch: Fetch | None = None, *, browser: str = "", skip: str = "", probe: str = "null", live: bool = True
    ) -> None:
        self.limits, self.skip, self.live = limits, skip, live  # skip: a selector of what is no part of the page
        self.centres: dict[str, list[float] | None] = {}
        self.script, self.probed = _script(probe), None  # an expression of ours whose value every look brings along
        self.unsettled = False
        self.path, self.fetch, self.token = find_chromium(browser), fetch, secrets.token_hex(8)
        self._connect()
        self.context: Any = None
        self.pages: list[Any] = []
        self.begun: tuple[Any, ...] = ()  # the tabs of the start
        self.front = 0
        self.snapshot: Any = None
        self.navigating = self.arrived = 0  # navigations begun and ended since the action
        self.late = False  # the page in front did not stop loading in time

    def _connect(self) -> None:
        self.key, self.process = _acquire(self.path, self.limits, self.fetch is not None)
        if self.fetch is not None and self.process.server is not None:
            self.process.server.worlds[self.token] = self.fetch

    @property
    def page(self) -> Any:
        if not self.pages:
            raise WorldFault("web: no tab is open; call begin first")
        return self.pages[self.front]

    @property
    def connected(self) -> bool:
        """Whether the browser is still there."""
        return self.context is not None and self.process.browser.is_connected()

    @property
    def _ms(self) -> float:
        return self.limits.deadline_s * 1000

    def begin(self, start: Start) -> None:
        if not self.process.browser.is_connected():  # it died in an earlier episode
            self.context, dead, key = None, self.process, self.key
            self._connect()
            _release(key, dead)
        self._end_context()
        settings: dict[str, Any] = {
            "viewport": {"width": start.viewport[0], "height": start.viewport[1]},
            "accept_downloads": False,
            "service_workers": "block",
            "locale": "en-US",
            "timezone_id": "UTC",
        }
        if start.cookies or start.storage:
            cookies = [{"path": "/", **cookie} for cookie in start.cookies]
            settings["storage_state"] = {"cookies": cookies, "origins": list(start.storage)}
        if start.geolocation:
            settings["geolocation"] = {"latitude": start.geolocation[0], "longitude": start.geolocation[1]}
            settings["permissions"] = ["geolocation"]
        if self.fetch is not None:
            settings["extra_http_headers"] = {WORLD_HEADER: self.token}
        try:
            self.context = self.process.browser.new_context(**settings)
            self.context.set_default_timeout(self._ms)
            self.context.route(self.limits.pattern(), lambda route: route.abort("blockedbyclient"))
            self.context.on("page", self._new_page)
            self.context.on("request", self._request)
            self.context.on("requestfailed", self._failed)
            for url in start.urls:
                if not self.limits.allows(url):
                    raise WorldFault(f"web: {url} is not among the allowed hosts")
                self.context.new_page()
                self.front = len(self.pages) - 1
                self._goto(url)
        except WorldFault:
            raise
        except ActionFailed as error:
            raise WorldFault(f"web: cannot begin: {error}") from error
        except Exception as error:
            raise fault("begin", self.limits, error) from error
        self.front, self.begun = 0, tuple(self.pages)
        if len(self.pages) > 1:
            self.page.bring_to_front()  # a tab in the back draws no frames, and waiting for one would take long

    def _new_page(self, page: Any) -> None:
        self.pages.append(page)
        self.front = len(self.pages) - 1
        page.on("dialog", lambda dialog: dialog.dismiss())
        page.on("framenavigated", self._committed)

    def _request(self, request: Any) -> None:
        if request.is_navigation_request() and request.frame.parent_frame is None and request.redirected_from is None:
            self.navigating += 1

    def _committed(self, frame: Any) -> None:
        if frame.parent_frame is None:
            self.arrived += 1

    def _failed(self, request: Any) -> None:
        if request.is_navigation_request() and request.frame.parent_frame is None:
            self.arrived += 1

    def _goto(self, url: str) -> None:
        """Open a page; one that goes on loading is left as it is when the time is over."""
        end = time.monotonic() + self.limits.deadline_s / 2
        try:
            self.page.goto(url, wait_until="commit", timeout=self._ms / 2)
        except Exception as error:
            raise ActionFailed(f"the page did not open: {str(error).splitlines()[0][:120]}") from error
        self._loaded(end)

    def _loaded(self, end: float) -> None:
        try:
            self.page.wait_for_load_state("load", timeout=max(1.0, 1000 * (end - time.monotonic())))
        except Exception:  # it never stops loading: what is there is looked at
            self.late = True
        else:
            self.late = False

    def open(self, url: str) -> None:
        check_allowed(self.limits, url)
        self._goto(url)

    @property
    def url(self) -> str:
        return str(self.page.url)

    def look(self) -> Page:
        quiet = 1000 * self.limits.settle_s if self.unsettled else -1
        options = {"budget": min(3000.0, self._ms / 3), "skip": self.skip, "quiet": quiet, "live": self.live}
        for attempt in (1, 2, 3):
            try:
                self.snapshot = self.page.wait_for_function(self.script, arg=options, timeout=self._ms)
                # the handle of a text is the text itself, so that it need not be asked for
                raw = json.loads(self.snapshot.evaluate("s => s.data") if self.live else str(self.snapshot))
                break
            except Exception as error:
                # the page was replaced while it was being read
                if attempt == 3 or not any(told in str(error) for told in ("context was destroyed", "navigat", "Cannot find context")):
                    raise fault("reading the page", self.limits, error) from error
                self._loaded(time.monotonic() + self.limits.deadline_s / 2)
        self.probed, self.unsettled, self.centres = raw["probe"], False, raw.get("centres", {})
        found = from_snapshot(raw)
        found.truncated = found.truncated or self.late
        return found

    def html(self) -> str:
        self._alive()
        return str(self.page.content())

    def _alive(self) -> None:
        """A page whose script never returns would hold an evaluation for ever: ask with a deadline first."""
        try:
            self.page.wait_for_function("() => true", timeout=self._ms)
        except Exception as error:
            raise fault("waiting for the page", self.limits, error) from error

    def locate(self, expression: str, prepare: tuple[str, ...] = ()) -> str | None:
        self._alive()
        try:
            for line in prepare:
                self.page.evaluate(f"() => {{ {line} }}")
            found = self.page.evaluate(f"() => {expression}")
        except Exception:
            return None  # an element on the way was missing
        return None if found is None else found if isinstance(found, str) else json.dumps(found)

    def act(self, action: WebAction, element: Element | None) -> None:
        check_target(action, element)
        before, self.navigating, self.arrived = self.url, 0, 0
        try:
            self._do(action, element)
            self.unsettled = True  # the next look waits for the quiet time
            if _expects_navigation(action, element) and before.startswith("http"):
                self._settle()
        except (ActionFailed, WorldFault):
            raise
        except Exception as error:
            if not self.process.browser.is_connected():
                raise fault(action.kind, self.limits, error) from error
            raise ActionFailed(f"{action.kind}: {str(error).splitlines()[0][:160]}") from error
        if not self.limits.allows(self.url) and self.url not in ("about:blank", before):
            refused = self.url
            self._goto(before)
            raise ActionFailed(f"{refused[:80]} is not among the allowed hosts")

    def _centre(self, element: Element) -> tuple[float, float]:
        found = self.snapshot.evaluate(_CENTRE, element.index) if self.live else self.centres.get(str(element.index))
        if found is None:
            raise ActionFailed("the element is gone or out of sight")
        return found[0], found[1]

    def _handle(self, element: Element) -> Any:
        if self.live:
            found = self.snapshot.evaluate_handle("(s, i) => s.elements[i]", element.index).as_element()
        else:
            script = "([x, y, tag]) => { const e = document.elementFromPoint(x, y); return e && e.closest(tag); }"
            found = self.page.evaluate_handle(script, [*self._centre(element), element.tag]).as_element()
        if found is None:
            raise ActionFailed("the element is gone")
        return found

    def _do(self, action: WebAction, element: Element | None) -> None:
        page = self.page
        match action.kind:
            case "click" | "right_click" | "hover":
                assert element is not None
                x, y = self._centre(element)
                if action.kind == "hover":
                    page.mouse.move(x, y)
                else:
                    page.mouse.click(x, y, button="right" if action.kind == "right_click" else "left")
            case "type" | "search":
                assert element is not None
                x, y = self._centre(element)
                if element.attributes.get("type") in ("date", "time", "month", "week", "datetime-local", "number"):
                    self._handle(element).fill(action.text.strip(), timeout=self._ms)  # fields of parts take their value whole
                    return
                page.mouse.click(x, y)
                page.keyboard.press("Control+A")
                text = action.text if element.tag == "textarea" else action.text.replace("\r", "").replace("\n", "")
                if not text:  # a text takes the place of what is selected
                    page.keyboard.press("Backspace")
                if len(text) > 1:  # all but the last letter at once; the last with its key events, which scripts listen to
                    page.keyboard.insert_text(text[:-1])
                page.keyboard.type(text[-1:])
                if action.kind == "search":
                    page.keyboard.press("Enter")
            case "select":
                assert element is not None
                position = option_position(element, action.text)
                handle = self._handle(element)
                handle.select_option(index=position, timeout=self._ms)
                handle.focus()
            case "press":
                keys = action.text.strip() or "Enter"
                if not _KEYS.fullmatch(keys):
                    raise ActionFailed(f"no such keys: {keys[:40]!r}")
                page.keyboard.press(re.sub(r"(?i)\bctrl\b", "Control", keys))
            case "scroll_up" | "scroll_down":
                height = page.viewport_size["height"] * 2 / 3
                page.mouse.wheel(0, height if action.kind == "scroll_down" else -height)
            case "back" | "forward":
                self._history(action.kind)
            case "new_tab":
                self.context.new_page()
            case "switch_tab":
                if int(action.text) >= len(self.pages):
                    raise ActionFailed(f"there are {len(self.pages)} tabs")
                self.front = int(action.text)
                self.page.bring_to_front()
            case "close_tab":
                if len(self.pages) == 1:
                    raise ActionFailed("the last tab stays open")
                self.pages.pop(self.front).close()
                self.front = min(self.front, len(self.pages) - 1)
            case "goto":
                check_allowed(self.limits, action.text.strip())
                self._goto(action.text.strip())
            case "wait":
                page.wait_for_timeout(min(1000.0, self._ms / 2))
            case _:
                pass

    def _history(self, kind: str) -> None:
        """Asked first, gone then: a step onto the blank page that lies under a start cannot be undone at once, as it changes processes."""
        wire = self.context.new_cdp_session(self.page)
        told = wire.send("Page.getNavigationHistory")
        wire.detach()
        place = told["currentIndex"] + (1 if kind == "forward" else -1)
        unseen = self.page in self.begun and place == 0 and told["entries"][0]["url"] == "about:blank"
        if unseen or not 0 <= place < len(told["entries"]):
            raise ActionFailed(f"there is no page to go {kind} to")
        end = time.monotonic() + self.limits.deadline_s / 2
        go = self.page.go_back if kind == "back" else self.page.go_forward
        go(wait_until="commit", timeout=self._ms / 2)
        self._loaded(end)

    def _settle(self) -> None:
        """Wait for the navigation that the action began, if it began one."""
        end = time.monotonic() + self.limits.deadline_s / 2
        patience = time.monotonic() + 1.0
        while True:
            try:
                self.page.wait_for_function(_QUIET, arg=1000 * self.limits.settle_s, timeout=max(1.0, 1000 * (end - time.monotonic())))
            except Exception as error:
                if "Timeout" in str(error):
                    raise fault("settling", self.limits, error) from error
            done = self.arrived >= self.navigating if self.navigating else time.monotonic() > patience
            if done or time.monotonic() > end:
                break
        if self.navigating:
            self._loaded(end)

    def run(self, script: str, argument: Any = None) -> Any:
        """The value of a script of ours in the page in front, within the deadline. Never for text of pages or models."""
        try:
            told = self.page.wait_for_function(f"async a => JSON.stringify([await ({script})(a)])", arg=argument, timeout=self._ms)
            return json.loads(str(told))[0]  # the handle of a text is the text itself
        except Exception as error:
            raise fault("a script", self.limits, error) from error

    def screenshot(self, element: Element | None = None) -> bytes:
        """A PNG of the viewport, the element in a frame."""
        self._alive()
        if element is not None and element.box is not None:
            self.page.evaluate(_MARK, list(element.box))
        try:
            return self.page.screenshot(timeout=self._ms)
        finally:
            if element is not None:
                self.page.evaluate(_UNMARK)

    def _end_context(self) -> None:
        if self.context is not None:
            self.context.close()
        self.context, self.pages, self.begun, self.front, self.snapshot = None, [], (), 0, None

    def close(self) -> None:
        if self.key is None:
            return
        try:
            self._end_context()
        finally:
            if self.process.server is not None:
                self.process.server.worlds.pop(self.token, None)
            key, self.key = self.key, None
            _release(key, self.process)


def _expects_navigation(action: WebAction, element: Element | None) -> bool:
    """Whether a plain page would go elsewhere: only then is it worth waiting for the start of a navigation."""
    if action.kind in ("search", "press"):
        return True
    if action.kind != "click" or element is None:
        return False
    for item in element.ancestors():
        if item.tag == "a" and item.attributes.get("href", "#").strip() not in ("", "#"):
            return True
        kind = item.attributes.get("type", "submit").lower()
        if (item.tag == "button" and kind == "submit") or (item.tag == "input" and kind in ("submit", "image")):
            return True
    return False
