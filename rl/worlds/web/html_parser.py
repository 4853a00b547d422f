"""HTML to a page model without a browser: enough of the language for plain pages with links and forms; no scripts,
no layout.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from html import unescape

from .elements import CLICK_ROLES, CLICK_TAGS, Element, FieldState, Page, collapse, options_of

# Every repetition is bounded or possessive, so that a page without closing quotes cannot make the search slow.
_TOKEN = re.compile(
    r"<!--.*?(?:-->|\Z)|<![^>]{0,2000}>|</([a-zA-Z][^\s>/]{0,60})[^>]{0,2000}>|"
    r"<([a-zA-Z][^\s>/]{0,60})((?:[^>\"']|\"[^\"]{0,20000}\"|'[^']{0,20000}'){0,4000}+)>",
    re.DOTALL,
)
_ATTRIBUTE = re.compile(r"""([^\s"'>/=]+)(?:\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'=<>`]+)))?""")
_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
_RAW = {"script", "style", "textarea", "title", "noscript"}
_SKIPPED = {"head", "script", "style", "noscript", "template", "title", "meta", "link", "base"}
_BLOCKS = set("p div ul ol table form h1 h2 h3 h4 h5 h6 section article nav main header footer hr pre".split())
# an opening tag -> open elements that it ends, within the nearest of the bounds
_ENDS: dict[str, tuple[set[str], set[str]]] = {
    "li": ({"li"}, {"ul", "ol"}),
    "option": ({"option"}, {"select"}),
    "select": ({"select", "option"}, {"table", "form", "div"}),  # no list stands in a list
    "tr": ({"tr", "td", "th"}, {"table"}),
    "td": ({"td", "th"}, {"tr", "table"}),
    "th": ({"td", "th"}, {"tr", "table"}),
    "tbody": ({"tbody", "thead", "tr", "td", "th"}, {"table"}),
    "dt": ({"dt", "dd"}, {"dl"}),
    "dd": ({"dt", "dd"}, {"dl"}),
}
LARGEST = 5_000_000  # characters; the rest is left out and the page says so
DEEPEST = 512  # levels, as in Chromium; what asks for the ancestors of every element stays linear
_HIDING = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden")


@dataclass(frozen=True)
class Parsed:
    """A page as it came: never changed afterwards, so it can be shared. `start` is what its fields hold at first."""

    root: Element
    labels: dict[int, Element]
    start: dict[int, FieldState]
    title: str
    truncated: bool
    cache: dict[str, str] = field(default_factory=dict)

    def page(self, url: str, fields: dict[int, FieldState]) -> Page:
        """The page model with what the fields hold now."""
        return Page(
            self.root,
            fields,
            url,
            self.title,
            self.truncated,
            self.labels,
            self.cache if fields == self.start else None,
        )


def parse_html(text: str, *, deadline_s: float = 5.0) -> Parsed:
    """The elements of a page. A page that is too large or takes too long is cut, and says so."""
    end = time.monotonic() + deadline_s
    truncated = len(text) > LARGEST
    text = text[:LARGEST]
    root = Element("html", {}, 0)
    body: Element | None = None
    open_: list[Element] = [root]
    title, count, at = "", 1, 0
    skipping: list[str] = []  # open elements whose content is no part of the page
    while found := _next_token(text, at, end):
        if found.start() > at and not skipping:
            if body is None and text[at : found.start()].strip():
                body, count = _make_body(root, open_, {}, count)
            if body is not None:
                open_[-1].children.append(unescape(text[at : found.start()]))
        at = found.end()
        if found[1]:
            tag = found[1].lower()
            if skipping:
                if tag in skipping:
                    del skipping[len(skipping) - 1 - skipping[::-1].index(tag) :]
            elif tag not in ("html", "body"):
                _close(open_, {tag}, {"table"} if tag in ("tr", "td", "th", "p", "div") else set())
            continue
        if not found[2]:
            continue
        tag = found[2].lower()
        if tag in _RAW:
            stop = re.compile(f"</{tag}[^>]{{0,200}}>", re.IGNORECASE).search(text, at)
            inner, at = text[at : stop.start() if stop else len(text)], stop.end() if stop else len(text)
            if tag == "title" and not title:
                title = collapse(unescape(inner))
            if tag != "textarea" or skipping:
                continue
        else:
            inner = ""
        if skipping or tag in _SKIPPED:
            if tag not in _VOID and tag not in _RAW and not found[3].rstrip().endswith("/") and len(skipping) < DEEPEST:
                skipping.append(tag)
            continue
        attributes = _attributes(found[3])
        if tag == "html":
            root.attributes = attributes
            continue
        if tag == "body":
            if body is None:
                body, count = _make_body(root, open_, attributes, count)
            continue
        if body is None:
            body, count = _make_body(root, open_, {}, count)
        if tag in _ENDS:
            _close(open_, *_ENDS[tag], every=True)
        elif tag in _BLOCKS:
            _close(open_, {"p"}, {"table", "div", "li", "td", "form"})
        if tag == "tr" and open_[-1].tag == "table":  # browsers put the row group in
            count = _open(open_, "tbody", {}, count)
        count = _open(open_, tag, attributes, count)
        if tag == "textarea":
            open_[-1].children.append(unescape(inner.removeprefix("\n")))
        if tag in _VOID or tag == "textarea":
            open_.pop()
        if count % 512 == 0 and time.monotonic() > end:
            truncated = True
            break
    else:
        truncated = truncated or time.monotonic() > end
        if body is not None and not skipping and text[at:].strip():
            open_[-1].children.append(unescape(text[at:]))
    if body is None:
        _make_body(root, open_, {}, count)
    start = _annotate(root)
    page = Page(root)
    return Parsed(root, page.labels, start, title, truncated)


def _next_token(text: str, at: int, end: float) -> re.Match[str] | None:
    """The next tag or comment; None where there is none, or the time is up. A page of half-open tags makes every try
    long.
    """
    start, tries = text.find("<", at), 0
    while start >= 0:
        found = _TOKEN.match(text, start)
        if found:
            return found
        tries += 1
        if tries % 16 == 0 and time.monotonic() > end:
            return None
        start = text.find("<", start + 1)
    return None


def _open(open_: list[Element], tag: str, attributes: dict[str, str], count: int) -> int:
    del open_[DEEPEST:]  # as browsers do: what is nested deeper becomes a sibling
    element = Element(tag, attributes, count, open_[-1])
    open_[-1].children.append(element)
    open_.append(element)
    return count + 1


def _make_body(root: Element, open_: list[Element], attributes: dict[str, str], count: int) -> tuple[Element, int]:
    del open_[1:]
    count = _open(open_, "body", attributes, count)
    return open_[-1], count


def _close(open_: list[Element], tags: set[str], bounds: set[str], every: bool = False) -> None:
    """End the nearest open element of these tags (or the outermost, with `every`), not looking past a bound."""
    target = 0
    for at in range(len(open_) - 1, 1, -1):
        if open_[at].tag in tags:
            target = at
            if not every:
                break
        elif open_[at].tag in bounds:
            break
    if target:
        del open_[target:]


def _attributes(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, double, single, bare in _ATTRIBUTE.findall(text):
        value = double or single or bare
        found.setdefault(name.lower(), unescape(value) if "&" in value else value)
    return found


def _annotate(root: Element) -> dict[int, FieldState]:
    """Mark what can be seen and clicked, and collect what the fields hold at first."""
    start: dict[int, FieldState] = {}
    ids: dict[str, Element] = {}
    for element in root.walk():
        attributes = element.attributes
        if "id" in attributes:
            ids.setdefault(attributes["id"], element)
        above = element.parent
        hidden = (
            "hidden" in attributes
            or bool(attributes.get("style") and _HIDING.search(attributes["style"]))
            or attributes.get("type") == "hidden"
        )
        hidden = hidden or attributes.get("aria-hidden") == "true" or (above is not None and above.tag == "select")
        element.visible = not hidden and (above is None or above.visible)
        if element.tag == "input":
            start[element.index] = FieldState(attributes.get("value", ""), "checked" in attributes)
        elif element.tag == "textarea":
            start[element.index] = FieldState("".join(c for c in element.children if isinstance(c, str)))
        elif element.tag == "select":
            start.update(choose(element, None))
    # elements with text in or below them, and those with a picture; asked once for all, from below
    worded: set[int] = set()
    pictured: set[int] = set()
    for element in reversed(list(root.walk())):
        below = element.below
        if any(isinstance(c, str) and collapse(c) for c in element.children) or any(c.index in worded for c in below):
            worded.add(element.index)
        if element.tag == "img" or any(c.index in pictured for c in below):
            pictured.add(element.index)
    for element in root.walk():
        element.clickable = element.visible and _clickable(
            element, ids, element.index in worded, element.index in pictured
        )
    return start


def choose(select: Element, position: int | None) -> dict[int, FieldState]:
    """The states of a drop-down list and its options with one chosen; None takes the one the page marks, or the
    first.
    """
    options = options_of(select)
    if position is None:
        marked = [i for i, e in enumerate(options) if "selected" in e.attributes]
        position = marked[-1] if marked else 0
    states = {e.index: FieldState(option_value(e), i == position) for i, e in enumerate(options)}
    states[select.index] = FieldState(
        option_value(options[position]) if options else "", False, position if options else -1
    )
    return states


def option_value(option: Element) -> str:
    """What a form sends for an option."""
    return option.attributes.get("value", option.text)


def control_of(label: Element, ids: dict[str, Element]) -> Element | None:
    """The field that a label belongs to."""
    if label.attributes.get("for"):
        return ids.get(label.attributes["for"])
    return next((e for e in label.walk() if e.tag in ("input", "select", "textarea", "button")), None)


def _clickable(element: Element, ids: dict[str, Element], worded: bool, pictured: bool) -> bool:
    attributes, tag = element.attributes, element.tag
    if tag == "label":
        control = control_of(element, ids)
        return control is not None and "disabled" not in control.attributes and worded
    if tag in CLICK_TAGS:
        return tag != "a" or worded or pictured
    if (
        "onclick" in attributes
        or ("jsaction" in attributes and "click" in attributes["jsaction"])
        or attributes.get("role", "").lower() in CLICK_ROLES
    ):
        return True
    if attributes.get("contenteditable", "false").lower() not in ("false", "inherit") or (
        tag == "img" and "usemap" in attributes
    ):
        return True
    if (
        "button" in attributes.get("class", "").lower()
        or attributes.get("tabindex", "-").isdigit()
        or "cursor:pointer" in attributes.get("style", "")
    ):
        return worded
    # the pointer cursor of a link is inherited by what stands in it
    link = next((e for e in element.ancestors() if e.tag == "a" and "href" in e.attributes), None)
    return link is not None and (worded or tag == "img")
