"""The text form of a simplified page: `<tag id="3" attr="v"> text <child> ... </child> </tag>`, single spaces
between all parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_OPEN = re.compile(r'<([A-Za-z][\w:.-]*)((?: [\w:.-]+="[^"]*+")*+)>')
_ATTRIBUTE = re.compile(r' ([\w:.-]+)="([^"]*+)"')
_CLOSE = re.compile(r"</([A-Za-z][\w:.-]*)>")
_TAG = re.compile(r"(?:^|(?<= ))(?:</[A-Za-z][\w:.-]*>|<[A-Za-z])")


class BadMarkup(ValueError):
    """A text that is no simplified page; the message names the place."""


@dataclass
class Markup:
    """One element of a simplified page. Attributes keep their order, content is text and elements."""

    tag: str
    attributes: tuple[tuple[str, str], ...] = ()
    content: list[Markup | str] = field(default_factory=list)

    @property
    def id(self) -> int | None:
        """The number an action names the element by."""
        identifier = dict(self.attributes).get("id", "")
        return int(identifier) if identifier.isascii() and identifier.isdigit() else None

    def walk(self) -> Iterator[Markup]:
        """This element and all below it, in reading order."""
        waiting: list[Markup] = [self]
        while waiting:
            item = waiting.pop()
            yield item
            waiting.extend(reversed([c for c in item.content if isinstance(c, Markup)]))


def write_markup(root: Markup) -> str:
    """The text of a page; `parse_markup` reads it back byte for byte."""
    parts: list[str] = []
    waiting: list[Markup | str] = [root]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            parts.append(item)
            continue
        named = "".join(f' {name}="{value}"' for name, value in item.attributes)
        parts.append(f"<{item.tag}{named}>")
        waiting.append(f"</{item.tag}>")
        waiting.extend(reversed(item.content))
    return " ".join(parts)


def parse_markup(text: str) -> Markup:
    """The page of a text. Values and text stay as they are written: nothing is unescaped, so nothing is lost."""
    outer = Markup("")
    open_ = [outer]
    at = 0
    while at < len(text):
        if found := _OPEN.match(text, at):
            item = Markup(found[1], tuple(_ATTRIBUTE.findall(found[2])))
            open_[-1].content.append(item)
            open_.append(item)
        elif found := _CLOSE.match(text, at):
            if open_[-1].tag != found[1] or len(open_) == 1:
                raise BadMarkup(f"character {at}: </{found[1]}> closes <{open_[-1].tag}>")
            open_.pop()
        else:
            end = _TAG.search(text, at)
            stop = end.start() - 1 if end else len(text)
            if len(open_) == 1 or stop <= at:
                raise BadMarkup(f"character {at}: {text[at : at + 40]!r} is no part of an element")
            open_[-1].content.append(text[at:stop])
            at = stop + 1
            continue
        at = found.end()
        if at < len(text):
            if text[at] != " ":
                raise BadMarkup(f"character {at}: expected one space after {found[0][:40]!r}")
            at += 1
    if len(open_) > 1:
        raise BadMarkup(f"<{open_[-1].tag}> is not closed")
    if len(outer.content) != 1 or not isinstance(outer.content[0], Markup):
        raise BadMarkup("expected one element that holds the page")
    return outer.content[0]
