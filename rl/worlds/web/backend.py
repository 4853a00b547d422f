"""What a World needs of a browser: one small protocol, kept by Chromium and by the pure-Python page model."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from ..base import WorldFault
from .actions import WebAction
from .elements import Element, Page, editable, options_of


class ActionFailed(RuntimeError):
    """An action that could not be carried out on this page: the agent's doing, not a fault of the machinery."""


@dataclass(frozen=True)
class Start:
    """Where and as whom an episode begins."""

    urls: tuple[str, ...]  # one tab each
    cookies: tuple[dict[str, Any], ...] = ()  # as in a Playwright storage state: name, value, domain, path
    storage: tuple[dict[str, Any], ...] = ()  # its `origins`: local storage by origin (Chromium only)
    geolocation: tuple[float, float] | None = None  # latitude, longitude
    viewport: tuple[int, int] = (1280, 720)


class Backend(Protocol):
    """A browser with tabs. Every call ends within the backend's deadline, with an answer or with a WorldFault."""

    has_layout: bool

    def begin(self, start: Start) -> None:
        """A fresh context: no cookies, no history, one tab for every address, the first in front."""
        ...

    def look(self) -> Page:
        """The page in front, with labels; elements of the latest look are those that `act` may name."""
        ...

    def act(self, action: WebAction, element: Element | None) -> None:
        """Carry out one action and wait until the page has settled; ActionFailed where the page does not allow it."""
        ...

    @property
    def url(self) -> str:
        """The address of the page in front."""
        ...

    def open(self, url: str) -> None:
        """Go to an address in the tab in front."""
        ...

    def html(self) -> str:
        """The whole document as text, for evaluators."""
        ...

    def locate(self, expression: str, prepare: tuple[str, ...] = ()) -> str | None:
        """The value of a task file's locator (`document.querySelector(...)...`); None when it names nothing."""
        ...

    def close(self) -> None:
        """End everything that was started."""
        ...


@dataclass(frozen=True)
class Limits:
    """Where a browser may go and how long it may take."""

    # host:port, or a host for its ports 80 (http) and 443 (https)
    hosts: frozenset[str] = field(default_factory=frozenset)
    files: str = ""  # a folder whose file:// pages may be opened
    deadline_s: float = 10.0  # of one navigation, action or look
    settle_s: float = 0.02  # quiet time after an action before a page is looked at

    def allows(self, url: str) -> bool:
        """Whether an address may be opened."""
        if url == "about:blank":
            return True
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), parts.port
        except ValueError:
            return False
        if parts.scheme == "file":
            path = parts.path
            return bool(self.files) and path.startswith(self.files.rstrip("/") + "/") and ".." not in path
        if parts.scheme not in ("http", "https") or parts.username or parts.password:
            return False
        usual = 443 if parts.scheme == "https" else 80
        return (host in self.hosts and port in (None, usual)) or f"{host}:{port or usual}" in self.hosts

    def pattern(self) -> re.Pattern[str]:
        """Matches every address that may NOT be requested."""
        allowed = [r"about:blank", r"data:", r"blob:"]
        if self.files:
            allowed.append(re.escape("file://" + self.files.rstrip("/") + "/"))
        for host in sorted(self.hosts):
            name, _, port = host.partition(":")
            usual = {"80": "(?::80)?", "443": "(?::443)?"}.get(port, f":{port}") if port else ""
            allowed.append(rf"https?://{re.escape(name)}{usual}(?:[/?#]|$)")
        return re.compile(f"^(?!{'|'.join(allowed)})", re.IGNORECASE)

    def origins(self) -> list[str]:
        """The allowed connections as Chromium's proxy rules name them; a rule without a scheme is for WebSockets
        too.
        """
        bare = ("http://{}:80", "ws://{}:80", "https://{}:443", "wss://{}:443")
        return [rule.format(host) for host in sorted(self.hosts) for rule in (("{}",) if ":" in host else bare)]


def check_target(action: WebAction, element: Element | None) -> None:
    """Refuse what no browser could do to the element: typing into a link, choosing an option of a text field."""
    if action.kind in ("type", "search") and element is not None and not editable(element):
        raise ActionFailed(f"<{element.tag}> takes no text")
    if action.kind == "select" and element is not None and element.tag != "select":
        raise ActionFailed(f"<{element.tag}> is no drop-down list")
    if element is not None and "disabled" in element.attributes:
        raise ActionFailed(f"<{element.tag}> is disabled")


def option_position(select: Element, wanted: str) -> int:
    """The first option whose text contains the words, case aside."""
    for position, option in enumerate(options_of(select)):
        if wanted.strip().lower() in option.text.lower():
            return position
    raise ActionFailed(f"no option holds {wanted[:40]!r}")


def check_allowed(limits: Limits, url: str) -> None:
    """Refuse an address outside the allowed hosts."""
    if not limits.allows(url):
        origin = re.match(r"[^/?#]*(?://[^/?#]*)?", url)  # of what is no address too, where urlsplit gives up
        raise ActionFailed(f"{origin[0][:80] if origin else url} is not among the allowed hosts")


def fault(what: str, limits: Limits, error: object) -> WorldFault:
    """The machinery failed: the deadline passed, the browser died."""
    return WorldFault(
        f"web: {what} failed within the deadline of {limits.deadline_s:g} s (deadline_s): "
        f"{str(error).splitlines()[0][:200]}"
    )
