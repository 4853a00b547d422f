"""Chromium through Playwright: the backend of record."""

from __future__ import annotations

import functools
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import resources
from typing import Any

from ..base import WorldFault
from .actions import WebAction
from .backend import ActionFailed, Limits, Start, check_allowed, check_target, fault, option_position
from .browser import acquire, find_chromium, release
from .elements import Element, Page, from_snapshot, submits
from .http import WORLD_HEADER, Fetch

MOST_TABS = 20  # further windows that a page opens are closed at once
_KEYS = re.compile(r"(?:(?:Control|Shift|Alt|Meta|ctrl|cmd)\+)*[\w-]{1,20}", re.IGNORECASE)
_CENTRE = """(s, i) => { const e = s.elements[i]; if (!e || !e.isConnected) return null;
  for (const r of e.getClientRects()) {
    const l = Math.max(0, r.left), t = Math.max(0, r.top);
    const x = Math.min(innerWidth, r.right), y = Math.min(innerHeight, r.bottom);
    if (x - l > 0 && y - t > 0) return [(l + x) / 2, (t + y) / 2]; } return null; }"""
_PASSING = ("context was destroyed", "navigat", "Cannot find context", "there is no document")
_QUIET = "ms => new Promise(done => setTimeout(() => requestAnimationFrame(() => done(true)), ms))"


@functools.cache
def _script(probe: str) -> str:
    text = (resources.files(__package__ or "terrella.rl.worlds.web") / "snapshot.js").read_text(encoding="utf-8")
    return text[text.index("async (options) =>") :].replace("PROBE", probe)


class ChromiumBackend:
    """A context of its own in a Chromium that the worlds of a thread share. `fetch` gives the local sites; None for
    pages elsewhere.

    With `live` an action meets its element where it is then; without, where it was when the page was looked at, which
    saves the browser two of the four questions of a step and is enough for pages that stay as they are between steps.
    """

    has_layout = True

    def __init__(
        self,
        limits: Limits,
        fetch: Fetch | None = None,
        *,
        browser: str = "",
        skip: str = "",
        probe: str = "null",
        live: bool = True,
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
        self.wires: dict[Any, Any] = {}  # page -> the line on which its renderer can be ended
        self.watched = False  # a call into the browser is under way, with its deadline
        self.broken = ""  # why the episode cannot go on: a renderer crashed, or was ended at a deadline
        self.refused = ""  # the address of a navigation since the action that the allowed hosts do not have

    def _connect(self) -> None:
        self.key, self.process = acquire(self.path, self.limits, self.fetch is not None)
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
        return self.context is not None and self.process.connected

    @property
    def _ms(self) -> float:
        return self.limits.deadline_s * 1000

    @contextmanager
    def _within(self, what: str, limit_s: float = 0.0) -> Iterator[None]:
        """Calls into the browser that end by the deadline. A page that never returns loses its renderer; the episode is
        then at fault, and the browser goes on for others."""
        if self.watched:
            yield
            return
        if self.broken:
            raise WorldFault(self.broken)
        limit_s = limit_s or self.limits.deadline_s
        self.watched = True
        try:
            # the calls' own limits first
            with self.process.watch(limit_s + 0.5, functools.partial(self._end_renderers, what)):
                yield
        except Exception as error:
            if self.broken:
                raise WorldFault(self.broken) from error
            if not self.process.connected:
                raise fault(what, self.limits, error) from error
            raise
        finally:
            self.watched = False
        if self.broken:
            raise WorldFault(self.broken)

    def _end_renderers(self, what: str) -> None:
        limit = f"the deadline of {self.limits.deadline_s:g} s (deadline_s)"
        self.broken = f"web: {what} did not end within {limit}: the page does not answer, and its process was ended"
        for wire in list(self.wires.values()):
            with suppress(Exception):  # the answer to this is the end of the line
                wire.send("Page.crash")

    def begin(self, start: Start) -> None:
        for attempt in (1, 2):
            self._end_context()
            if not self.process.connected:  # it died in an earlier episode, or of closing it
                dead, key = self.process, self.key
                self._connect()
                release(key, dead)
            try:
                with self._within("begin", self.limits.deadline_s * (1 + len(start.urls))):
                    return self._begin(start)
            except WorldFault:
                if attempt == 2 or self.process.connected or self.pages:  # a death of before that shows only now
                    raise

    def _begin(self, start: Start) -> None:
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
            for event, handler in {
                "page": self._new_page,
                "request": self._request,
                "requestfailed": self._failed,
            }.items():
                self.context.on(event, functools.partial(self._if_present, self.context, handler))
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
        if not self.pages:
            raise WorldFault("web: begin failed: the page closed its own window")
        self.front, self.begun = 0, tuple(self.pages)
        if len(self.pages) > 1:
            self.page.bring_to_front()  # a tab in the back draws no frames, and waiting for one would take long

    def _new_page(self, page: Any) -> None:
        if len(self.pages) >= MOST_TABS:
            with suppress(Exception):
                page.close()
            return
        self.pages.append(page)
        self.front = len(self.pages) - 1
        page.on("dialog", _dismiss)
        page.on("framenavigated", self._committed)
        page.on("crash", self._crashed)
        page.on("close", self._gone)
        with suppress(Exception):  # it closed at once
            # now, as the line reaches a renderer that hangs only if it was there before
            self.wires[page] = self.context.new_cdp_session(page)

    def _crashed(self, page: Any) -> None:
        if page in self.pages and not self.broken:
            self.broken = f"web: the page's process crashed (out of memory?): {str(page.url)[:80]}"

    def _gone(self, page: Any) -> None:
        """A window that its own script closed is no tab any more."""
        self.wires.pop(page, None)
        if page in self.pages:
            self.pages.remove(page)
            self.front = min(self.front, max(0, len(self.pages) - 1))

    def _if_present(self, context: Any, handler: Callable[[Any], None], event: Any) -> None:
        """Events of an earlier episode's pages may come late."""
        if context is self.context:
            handler(event)

    def _request(self, request: Any) -> None:
        if _opens_a_page(request, new_window=False) and request.redirected_from is None:
            self.navigating += 1

    def _committed(self, frame: Any) -> None:
        if frame.parent_frame is None:
            self.arrived += 1

    def _failed(self, request: Any) -> None:
        if _opens_a_page(request, new_window=False):
            self.arrived += 1
        if _opens_a_page(request, new_window=True) and not self.limits.allows(request.url):
            self.refused = str(request.url)

    def _goto(self, url: str) -> None:
        """Open a page; one that goes on loading is left as it is when the time is over."""
        end = time.monotonic() + self.limits.deadline_s / 2
        try:
            self.page.goto(url, wait_until="commit", timeout=self._ms / 2)
        except Exception as error:
            if self.refused:
                raise ActionFailed(f"it leads to {self.refused[:80]}, which is not among the allowed hosts") from error
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
        with self._within("opening a page"):
            self._goto(url)

    @property
    def url(self) -> str:
        return str(self.page.url)

    def look(self) -> Page:
        with self._within("reading the page"):
            return self._look()

    def _look(self) -> Page:
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
                if attempt == 3 or not any(words in str(error) for words in _PASSING):
                    raise fault("reading the page", self.limits, error) from error
                self._loaded(time.monotonic() + self.limits.deadline_s / 2)
        if raw["url"].startswith("chrome-error:"):  # it went there by itself, after the last action
            there = (
                f"{self.refused[:80]}, which is not among the allowed hosts"
                if self.refused
                else "a page that did not open"
            )
            raise WorldFault(f"web: the page led to {there}")
        self.probed, self.unsettled, self.centres = raw["probe"], False, raw.get("centres", {})
        page = from_snapshot(raw)
        page.truncated = page.truncated or self.late
        return page

    def html(self) -> str:
        with self._within("reading the document"):
            return str(self.page.content())

    def locate(self, expression: str, prepare: tuple[str, ...] = ()) -> str | None:
        with self._within("a locator"):
            try:
                for line in prepare:
                    self.page.evaluate(f"() => {{ {line} }}")
                found = self.page.evaluate(f"() => {expression}")
            except Exception:
                found = None  # an element on the way was missing
        return None if found is None else found if isinstance(found, str) else json.dumps(found)

    def act(self, action: WebAction, element: Element | None) -> None:
        check_target(action, element)
        with self._within(action.kind):
            self._act(action, element)

    def _act(self, action: WebAction, element: Element | None) -> None:
        before, self.navigating, self.arrived, self.refused = self.url, 0, 0, ""
        try:
            self._do(action, element)
            self.unsettled = True  # the next look waits for the quiet time
            if _expects_navigation(action, element) and before.startswith("http"):
                self._settle()
        except (ActionFailed, WorldFault):
            raise
        except Exception as error:
            raise ActionFailed(f"{action.kind}: {str(error).splitlines()[0][:160]}") from error
        if not self.pages:
            raise WorldFault("web: the page closed its last window")
        if not self.limits.allows(self.url) and self.url not in ("about:blank", before):
            refused = self.refused or self.url
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
                    # fields of parts take their value whole
                    self._handle(element).fill(action.text.strip(), timeout=self._ms)
                else:
                    page.mouse.click(x, y)
                    self._write(action.text if element.tag == "textarea" else re.sub(r"[\r\n]", "", action.text))
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

    def _write(self, text: str) -> None:
        """Put a text in the place of what the field with the focus holds."""
        keyboard = self.page.keyboard
        keyboard.press("Control+A")
        if not text:  # a text takes the place of what is selected
            keyboard.press("Backspace")
        # all but the last letter at once; the last with its key events, which scripts listen to
        if len(text) > 1:
            keyboard.insert_text(text[:-1])
        keyboard.type(text[-1:])

    def _history(self, kind: str) -> None:
        """Asked first, gone then: a step onto the blank page that lies under a start cannot be undone at once, as it
        changes processes.
        """
        wire = self.context.new_cdp_session(self.page)
        history = wire.send("Page.getNavigationHistory")
        wire.detach()
        place = history["currentIndex"] + (1 if kind == "forward" else -1)
        unseen = self.page in self.begun and place == 0 and history["entries"][0]["url"] == "about:blank"
        if unseen or not 0 <= place < len(history["entries"]):
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
                self.page.wait_for_function(
                    _QUIET, arg=1000 * self.limits.settle_s, timeout=max(1.0, 1000 * (end - time.monotonic()))
                )
            except Exception as error:
                if "Timeout" in str(error) or self.broken:
                    raise fault("settling", self.limits, error) from error
            done = self.arrived >= self.navigating if self.navigating else time.monotonic() > patience
            if done or time.monotonic() > end:
                break
        if self.navigating:
            self._loaded(end)

    def run(self, script: str, argument: Any = None) -> Any:
        """The value of a script of ours in the page in front, within the deadline. Never for text of pages or
        models.
        """
        try:
            with self._within("a script"):
                handle = self.page.wait_for_function(
                    f"async a => JSON.stringify([await ({script})(a)])", arg=argument, timeout=self._ms
                )
            return json.loads(str(handle))[0]  # the handle of a text is the text itself
        except WorldFault:
            raise
        except Exception as error:
            raise fault("a script", self.limits, error) from error

    def _end_context(self) -> None:
        context, self.context, self.broken = self.context, None, ""
        if context is not None and self.process.connected:
            with self.process.watch(
                self.limits.deadline_s, functools.partial(self._end_renderers, "closing the pages")
            ):
                with suppress(Exception):  # the browser died of it, and the next start has another
                    context.close()
        self.pages, self.begun, self.front, self.snapshot, self.wires, self.broken = [], (), 0, None, {}, ""

    def close(self) -> None:
        if self.key is None:
            return
        try:
            self._end_context()
        finally:
            if self.process.server is not None:
                self.process.server.worlds.pop(self.token, None)
            key, self.key = self.key, None
            release(key, self.process)


def _opens_a_page(request: Any, new_window: bool) -> bool:
    """Whether a request is for a whole page; `new_window` is the answer for one that is still being opened and has
    no frame.
    """
    if not request.is_navigation_request():
        return False
    try:
        return request.frame.parent_frame is None
    except Exception:
        return new_window


def _dismiss(dialog: Any) -> None:
    with suppress(Exception):  # the page went away under its dialog
        dialog.dismiss()


def _expects_navigation(action: WebAction, element: Element | None) -> bool:
    """Whether a plain page would go elsewhere: only then is it worth waiting for the start of a navigation."""
    if action.kind in ("search", "press"):
        return True
    if action.kind != "click" or element is None:
        return False
    for item in element.ancestors():
        if item.tag == "a" and item.attributes.get("href", "#").strip() not in ("", "#"):
            return True
        if submits(item):
            return True
    return False
