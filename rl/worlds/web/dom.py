"""The page model as a backend: links, forms, tabs, history and cookies in pure Python, for machines without a
browser.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from urllib.parse import quote_plus, urljoin, urlsplit, urlunsplit

from ..base import WorldFault
from .actions import WebAction
from .backend import ActionFailed, Limits, Start, check_allowed, check_target, option_position
from .elements import Element, FieldState, Page, editable, input_type, submits
from .html_parser import Parsed, choose, control_of, parse_html
from .http import Fetch, make_request
from .locators import evaluate_locator, outer_html

parse_cached = functools.lru_cache(maxsize=512)(parse_html)
MOST_REDIRECTS = 10


@dataclass
class Tab:
    """One tab: the addresses it has been to, where in them it is, and the page in it."""

    history: list[str] = field(default_factory=list)
    position: int = -1
    parsed: Parsed | None = None
    source: str = ""
    fields: dict[int, FieldState] = field(default_factory=dict)
    focus: Element | None = None


class DomBackend:
    """Pages from `fetch`, without a browser: no layout, no viewport, no scripts."""

    has_layout = False

    def __init__(self, fetch: Fetch, limits: Limits) -> None:
        self.fetch, self.limits = fetch, limits
        self.tabs: list[Tab] = []
        self.front = 0
        self.cookies: dict[str, dict[str, str]] = {}

    def begin(self, start: Start) -> None:
        self.tabs, self.front, self.cookies = [], 0, {}
        for cookie in start.cookies:
            self.cookies.setdefault(str(cookie["domain"]).lstrip("."), {})[str(cookie["name"])] = str(cookie["value"])
        for url in start.urls:
            self.tabs.append(Tab())
            self.front = len(self.tabs) - 1
            try:
                self._go(url)
            except ActionFailed as error:
                raise WorldFault(f"web: cannot open {url}: {error}") from error
        self.front = 0

    @property
    def tab(self) -> Tab:
        if not self.tabs:
            raise WorldFault("web: no tab is open; call begin first")
        return self.tabs[self.front]

    @property
    def url(self) -> str:
        return self.tab.history[self.tab.position] if self.tab.history else "about:blank"

    def _load(self, url: str, body: str | None = None) -> str:
        """Fetch a page into the tab in front, follow redirects, and return the address where it ended."""
        method, tab, fragment = ("GET" if body is None else "POST"), self.tab, urlsplit(url).fragment
        for _ in range(MOST_REDIRECTS):
            check_allowed(self.limits, url)
            if url == "about:blank":
                tab.parsed, tab.source, tab.fields, tab.focus = parse_cached("<html><body></body></html>"), "", {}, None
                return url
            host = urlsplit(url).hostname or ""
            response = self.fetch(
                make_request(method, _without_fragment(url), body or "", dict(self.cookies.get(host, {})))
            )
            self.cookies.setdefault(host, {}).update(response.cookies)
            if not response.location:
                tab.parsed, tab.source = parse_cached(response.body), response.body
                tab.fields, tab.focus = dict(tab.parsed.start), None
                return url if not fragment or urlsplit(url).fragment else f"{url}#{fragment}"
            method, body, url = "GET", None, urljoin(url, response.location)
        raise ActionFailed(f"more than {MOST_REDIRECTS} redirects")

    def _go(self, url: str, body: str | None = None) -> None:
        check_allowed(self.limits, url)
        if urlsplit(url).path == "" and urlsplit(url).scheme in ("http", "https"):
            url = urlunsplit(urlsplit(url)._replace(path="/"))
        here = self.url
        if body is None and "#" in url and self.tab.parsed and _without_fragment(url) == _without_fragment(here):
            end = url  # only the place in the page changes
        else:
            end = self._load(url, body)
        tab = self.tab
        if end != here or body is not None or not tab.history:
            del tab.history[tab.position + 1 :]
            tab.history.append(end)
            tab.position = len(tab.history) - 1

    def open(self, url: str) -> None:
        self._go(url)

    def look(self) -> Page:
        tab = self.tab
        assert tab.parsed is not None
        return tab.parsed.page(self.url, tab.fields)

    def html(self) -> str:
        assert self.tab.parsed is not None
        return outer_html(self.tab.parsed.root)

    def locate(self, expression: str, prepare: tuple[str, ...] = ()) -> str | None:
        if prepare:
            raise WorldFault("web: prep_actions run scripts in the page; use backend: chromium")
        return evaluate_locator(self.look(), expression)

    def act(self, action: WebAction, element: Element | None) -> None:
        check_target(action, element)
        tab = self.tab
        match action.kind:
            case "click":
                assert element is not None
                self._click(element)
            case "type" | "search":
                assert element is not None
                self._type(element, action.text)
                if action.kind == "search":
                    self._enter()
            case "select":
                assert element is not None
                tab.fields.update(choose(element, option_position(element, action.text)))
                tab.focus = element
            case "press":
                if action.text.strip().lower() == "enter":
                    self._enter()
            case "back" | "forward":
                position = tab.position + (1 if action.kind == "forward" else -1)
                if not 0 <= position < len(tab.history):
                    raise ActionFailed(f"there is no page to go {action.kind} to")
                self._load(tab.history[position])
                tab.position = position
            case "new_tab":
                self.tabs.append(Tab())
                self.front = len(self.tabs) - 1
                self._go("about:blank")
            case "switch_tab":
                if int(action.text) >= len(self.tabs):
                    raise ActionFailed(f"there are {len(self.tabs)} tabs")
                self.front = int(action.text)
            case "close_tab":
                if len(self.tabs) == 1:
                    raise ActionFailed("the last tab stays open")
                del self.tabs[self.front]
                self.front = min(self.front, len(self.tabs) - 1)
            case "goto":
                self._go(action.text.strip())
            case _:  # hover, right click, wait and scroll change nothing on pages without scripts and layout
                pass

    def _click(self, element: Element) -> None:
        tab = self.tab
        for item in element.ancestors():
            if item.tag == "a" and "href" in item.attributes:
                return self._follow(item)
            if item.tag == "label":
                ids = {e.attributes["id"]: e for e in _root(item).walk() if "id" in e.attributes}
                control = control_of(item, ids)
                if control is not None and "disabled" not in control.attributes:
                    return self._click(control)
                return None
            if item.tag in ("input", "button", "select", "textarea"):
                tab.focus = item
                return self._press(item)
        return None

    def _follow(self, link: Element) -> None:
        target = urljoin(self.url, link.attributes["href"].strip())
        if urlsplit(target).scheme not in ("http", "https"):
            raise ActionFailed(f"a link of the kind {urlsplit(target).scheme}: is not followed")
        check_allowed(self.limits, target)
        if link.attributes.get("target") == "_blank":
            self.tabs.append(Tab())
            self.front = len(self.tabs) - 1
        self._go(target)

    def _press(self, field_: Element) -> None:
        tab, kind = self.tab, input_type(field_)
        held = tab.fields.get(field_.index, FieldState())
        if kind == "checkbox":
            tab.fields[field_.index] = replace(held, checked=not held.checked)
        elif kind == "radio":
            for other in _root(field_).walk():
                same = input_type(other) == "radio" and other.attributes.get("name") == field_.attributes.get("name")
                if same and _form(other) is _form(field_):
                    tab.fields[other.index] = replace(tab.fields[other.index], checked=other is field_)
        elif submits(field_):
            form = _form(field_)
            if form is not None:
                self._submit(form, field_)
        elif kind == "reset" or (field_.tag == "button" and field_.attributes.get("type", "").lower() == "reset"):
            assert tab.parsed is not None
            tab.fields = dict(tab.parsed.start)

    def _type(self, element: Element, text: str) -> None:
        tab = self.tab
        tab.focus = element
        if "readonly" in element.attributes:
            return
        if element.tag != "textarea":
            text = text.replace("\r", "").replace("\n", "")
        limit = element.attributes.get("maxlength", "")
        text = text[: int(limit)] if limit.isdigit() else text
        tab.fields[element.index] = FieldState(text.replace("\r\n", "\n"))

    def _enter(self) -> None:
        focus = self.tab.focus
        if focus is None:
            return
        if focus.tag == "textarea":
            held = self.tab.fields.get(focus.index, FieldState())
            self.tab.fields[focus.index] = FieldState(held.value + "\n")
        elif editable(focus) or input_type(focus) in ("checkbox", "radio"):
            form = _form(focus)
            if form is not None:
                buttons = [e for e in form.walk() if submits(e)]
                fields = [e for e in form.walk() if e.tag == "input" and editable(e)]
                if buttons:
                    self._submit(form, buttons[0])
                elif len(fields) == 1:
                    self._submit(form, None)
        elif focus.tag in ("button", "input"):
            self._press(focus)

    def _submit(self, form: Element, button: Element | None) -> None:
        if button is not None and "disabled" in button.attributes:
            return
        pairs: list[tuple[str, str]] = []
        for item in form.walk():
            name, held = item.attributes.get("name", ""), self.tab.fields.get(item.index, FieldState())
            empty = not held.value and item.tag in ("input", "textarea", "select")
            if (
                "required" in item.attributes
                and empty
                and "formnovalidate" not in (button.attributes if button else {})
            ):
                raise ActionFailed("a required field is empty")
            if not name or "disabled" in item.attributes:
                continue
            if item is button:
                pairs.append((name, item.attributes.get("value", "")))
            elif input_type(item) in ("checkbox", "radio"):
                if held.checked:
                    pairs.append((name, item.attributes.get("value", "on")))
            elif item.tag in ("select", "textarea") or (
                item.tag == "input" and (editable(item) or input_type(item) == "hidden")
            ):
                if item.tag != "select" or held.chosen >= 0:
                    pairs.append((name, held.value))
        body = "&".join(f"{_form_quote(n)}={_form_quote(v)}" for n, v in pairs)
        attributes = button.attributes if button is not None else {}
        target = urljoin(
            self.url, attributes.get("formaction") or form.attributes.get("action") or _without_fragment(self.url)
        )
        if (attributes.get("formmethod") or form.attributes.get("method", "get")).lower() == "post":
            self._go(target, body)
        else:
            self._go(urlunsplit(urlsplit(target)._replace(query=body, fragment="")))

    def close(self) -> None:
        self.tabs = []


def _form_quote(text: str) -> str:
    return quote_plus(text.replace("\r\n", "\n").replace("\n", "\r\n"), safe="*").replace("~", "%7E")


def _form(element: Element) -> Element | None:
    return next((e for e in element.ancestors() if e.tag == "form"), None)


def _root(element: Element) -> Element:
    *_, root = element.ancestors()
    return root


def _without_fragment(url: str) -> str:
    return urlunsplit(urlsplit(url)._replace(fragment=""))
