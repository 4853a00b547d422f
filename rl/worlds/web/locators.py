"""The locators of task files without a browser: `document.querySelector('css')...property`, read by a small parser
of our own.
"""

from __future__ import annotations

import html
import re

from ..base import WorldFault
from .elements import Element, Page, collapse

_CALL = re.compile(
    r"""\.?(querySelector|querySelectorAll|getAttribute|getElementById)\((['"])(.*?)\2\)(?:\[(\d{1,4})\])?""", re.DOTALL
)
_NAME = re.compile(
    r"\??\.(outerText|innerText|textContent|value|checked|selectedIndex|outerHTML|innerHTML|href|"
    r"lastElementChild|firstElementChild|parentElement|nextElementSibling|length|title|className|id)\b(?!\()"
)
_STRING = re.compile(r"\.toString\(\)|\.trim\(\)")
_SIMPLE = re.compile(
    r"""(?P<tag>[A-Za-z][\w-]*|\*)?(?P<rest>(?:[#.][\w-]+"""
    r"""|\[[\w:-]+(?:[~^$*|]?=(?:"[^"]*"|'[^']*'|[\w-]+))?\]?|:nth-child\(\d+\))*)"""
)
_PART = re.compile(
    r"""#(?P<id>[\w-]+)|\.(?P<cls>[\w-]+)"""
    r"""|\[(?P<name>[\w:-]+)(?:(?P<op>[~^$*|]?=)(?:"(?P<d>[^"]*)"|'(?P<s>[^']*)'|(?P<b>[\w-]+)))?\]?"""
    r"""|:nth-child\((?P<nth>\d+)\)"""
)
_BLOCKS = set("div p li tr h1 h2 h3 h4 ul ol table form section main header nav tbody option br".split())


class NoLocator(WorldFault):
    """A locator outside what is read here; it needs Chromium."""


def evaluate_locator(page: Page, expression: str) -> str | None:
    """The text a locator gives; None where it names no element. Anything but selections and properties is refused."""
    text = expression.strip()
    if not text.startswith("document"):
        raise NoLocator(f"web: the locator {text[:60]!r} runs a script; use backend: chromium")
    at = len("document")
    value: Element | list[Element] | str | int | bool | None = page.root
    while at < len(text):
        if match := _CALL.match(text, at):
            value = _call(value, match[1], match[3], match[4])
        elif match := _NAME.match(text, at):
            value = _property(page, value, match[1])
        elif match := _STRING.match(text, at):
            value = _written(value)
        else:
            raise NoLocator(
                f"web: the locator {text[:80]!r} is more than selections and properties; use backend: chromium"
            )
        if value is None:
            return None
        at = match.end()
    return _written(value)


def _written(found: Element | list[Element] | str | int | bool | None) -> str | None:
    if isinstance(found, bool):
        return "true" if found else "false"
    if isinstance(found, Element | list):
        raise NoLocator("web: a locator must end in a property")
    return None if found is None else str(found)


def _call(found: object, name: str, argument: str, position: str | None) -> Element | list[Element] | str | None:
    if not isinstance(found, Element):
        return None
    if name == "getAttribute":
        return found.attributes.get(argument)
    if name == "getElementById":
        return next((e for e in found.walk() if e.attributes.get("id") == argument), None)
    hits = select(found, argument)
    if name == "querySelectorAll":
        if position is None:
            return hits
        return hits[int(position)] if int(position) < len(hits) else None
    return hits[0] if hits else None


def _property(page: Page, found: object, name: str) -> Element | str | int | bool | None:
    if isinstance(found, list):
        return len(found) if name == "length" else None
    if not isinstance(found, Element):
        return None
    held = page.fields.get(found.index)
    below = found.below
    match name:
        case "outerText" | "innerText":
            return visible_text(found)
        case "textContent":
            return found.raw_text
        case "value":
            return held.value if held else found.attributes.get("value")
        case "checked":
            return bool(held and held.checked)
        case "selectedIndex":
            return held.chosen if held else None
        case "outerHTML":
            return outer_html(found)
        case "innerHTML":
            return "".join(html.escape(c, quote=False) if isinstance(c, str) else outer_html(c) for c in found.children)
        case "lastElementChild" | "firstElementChild":
            return below[-1 if name[0] == "l" else 0] if below else None
        case "parentElement":
            return found.parent
        case "nextElementSibling":
            row = found.parent.below if found.parent else [found]
            after = row[row.index(found) + 1 :]
            return after[0] if after else None
        case "className":
            return found.attributes.get("class", "")
        case _:
            return found.attributes.get(name, "")


def visible_text(element: Element) -> str:
    """The text a reader sees, near to a browser's innerText: blocks begin new lines, hidden parts are left out."""
    parts: list[str] = []
    waiting: list[Element | str] = [element]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            parts.append(item if item == "\n" else re.sub(r"\s+", " ", item))
        elif item.visible or item.tag == "option":
            if item.tag in _BLOCKS:
                parts.append("\n")
                waiting.append("\n")
            elif item.tag in ("td", "th"):
                waiting.append("\t")
            waiting.extend(reversed(item.children))
    return "\n".join(line for raw in "".join(parts).split("\n") if (line := collapse(raw)))


def outer_html(element: Element) -> str:
    """An element as HTML again, with double quotes and the five usual escapes."""
    parts: list[str] = []
    waiting: list[Element | str | tuple[str]] = [element]
    while waiting:
        item = waiting.pop()
        if isinstance(item, tuple):
            parts.append(item[0])
        elif isinstance(item, str):
            parts.append(html.escape(item, quote=False))
        else:
            attributes = "".join(f' {n}="{html.escape(v, quote=True)}"' for n, v in item.attributes.items())
            parts.append(f"<{item.tag}{attributes}>")
            if item.tag not in ("br", "hr", "img", "input"):
                waiting.append((f"</{item.tag}>",))
            waiting.extend(reversed(item.children))
    return "".join(parts)


def select(root: Element, selector: str) -> list[Element]:
    """Elements below `root` that a CSS selector names: tags, #id, .class, [attr=..], descendant and child, commas."""
    chains = [_chain(part) for part in selector.split(",")]
    return [e for e in root.walk() if e is not root and any(_matches(e, chain) for chain in chains)]


def _chain(text: str) -> list[tuple[str, str, str]]:
    """(combinator before it, tag, conditions) of every compound, from left to right."""
    found: list[tuple[str, str, str]] = []
    at, combinator, text = 0, " ", text.strip()
    while at < len(text):
        match = _SIMPLE.match(text, at)
        if match is None or match.end() == at:
            raise NoLocator(f"web: the selector {text[:60]!r} is not read without a browser; use backend: chromium")
        found.append((combinator, (match["tag"] or "*").lower(), match["rest"]))
        rest = text[match.end() :]
        at = len(text) - len(rest.lstrip())
        combinator = " "
        if at < len(text) and text[at] == ">":
            combinator, at = ">", at + 1 + len(text[at + 1 :]) - len(text[at + 1 :].lstrip())
    return found


def _matches(element: Element, chain: list[tuple[str, str, str]]) -> bool:
    combinator, tag, rest = chain[-1]
    if not _fits(element, tag, rest):
        return False
    if len(chain) == 1:
        return True
    above = list(element.ancestors())[1:]
    return any(_matches(e, chain[:-1]) for e in (above[:1] if combinator == ">" else above))


def _fits(element: Element, tag: str, rest: str) -> bool:
    if tag not in ("*", element.tag):
        return False
    attributes = element.attributes
    for part in _PART.finditer(rest):
        if part["id"] and attributes.get("id") != part["id"]:
            return False
        if part["cls"] and part["cls"] not in attributes.get("class", "").split():
            return False
        if part["nth"]:
            row = element.parent.below if element.parent else []
            if element not in row or row.index(element) + 1 != int(part["nth"]):
                return False
        if part["name"]:
            value, wanted = attributes.get(part["name"]), part["d"] or part["s"] or part["b"] or ""
            if value is None or not _compare(value, part["op"], wanted):
                return False
    return True


def _compare(value: str, op: str | None, wanted: str) -> bool:
    return {
        None: True,
        "=": value == wanted,
        "~=": wanted in value.split(),
        "^=": value.startswith(wanted),
        "$=": value.endswith(wanted),
        "*=": wanted in value,
        "|=": value == wanted or value.startswith(f"{wanted}-"),
    }[op]
