"""Pages as both backends give them: a tree of elements, what their fields hold, and the numbers that actions use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Box = tuple[int, int, int, int]  # left, top, width, height


class Element:
    """One element. `index` counts elements in reading order; `label` is the number that an observation shows."""

    __slots__ = ("attributes", "box", "children", "clickable", "index", "label", "parent", "tag", "visible")

    def __init__(self, tag: str, attributes: dict[str, str], index: int, parent: Element | None = None) -> None:
        self.tag, self.attributes, self.index, self.parent = tag, attributes, index, parent
        self.children: list[Element | str] = []
        self.box: Box | None = None
        self.visible, self.clickable = True, False
        self.label: int | None = None

    def walk(self) -> Iterator[Element]:
        """This element and all below it, in reading order."""
        waiting: list[Element] = [self]
        while waiting:
            item = waiting.pop()
            yield item
            waiting.extend(reversed(item.below))

    @property
    def below(self) -> list[Element]:
        """The child elements, without the text between them."""
        return [child for child in self.children if isinstance(child, Element)]

    def ancestors(self) -> Iterator[Element]:
        """This element, then its parent, up to the root."""
        item: Element | None = self
        while item is not None:
            yield item
            item = item.parent

    @property
    def text(self) -> str:
        """All text in and below the element, white space collapsed."""
        return collapse(self.raw_text)

    @property
    def raw_text(self) -> str:
        """All text in and below the element as it stands."""
        parts: list[str] = []
        waiting: list[Element | str] = [self]
        while waiting:
            item = waiting.pop()
            if isinstance(item, str):
                parts.append(item)
            else:
                waiting.extend(reversed(item.children))
        return "".join(parts)

    @property
    def own_text(self) -> list[str]:
        """The element's own text nodes that are not blank."""
        return [text for child in self.children if isinstance(child, str) and (text := collapse(child))]


@dataclass(frozen=True)
class FieldState:
    """What a field holds now: the text of an input, a tick, or the position of the chosen option."""

    value: str = ""
    checked: bool = False
    chosen: int = -1


@dataclass
class Page:
    """One page as an observation is made from it."""

    root: Element
    fields: dict[int, FieldState] = field(default_factory=dict)  # by element index
    url: str = ""
    title: str = ""
    truncated: bool = False  # the page was too large, or did not stop loading: only a part is here
    labels: dict[int, Element] = field(default_factory=dict)
    cache: dict[str, str] | None = None  # observations of a page that is as it came

    def __post_init__(self) -> None:
        if not self.labels:
            self.labels = number(self.root)


INPUT_BUTTONS = {"submit", "reset", "button", "image", "checkbox", "radio", "hidden", "file", "range", "color"}
CLICK_TAGS = {"input", "textarea", "select", "button", "a", "iframe", "video", "object", "embed", "details"}
CLICK_ROLES = {"button", "tab", "link", "checkbox", "menuitem", "menuitemcheckbox", "menuitemradio", "radio"}


def collapse(text: str) -> str:
    """The text with single spaces and none at the ends."""
    return " ".join(text.split())


def options_of(select: Element) -> list[Element]:
    """The options of a drop-down list, in order."""
    return [e for e in select.walk() if e.tag == "option"]


def input_type(element: Element) -> str:
    """The kind of an input, lower case; empty for other elements."""
    return (element.attributes.get("type") or "text").lower() if element.tag == "input" else ""


def editable(element: Element) -> bool:
    """Whether text can be typed into the element."""
    if element.tag == "textarea" or element.attributes.get("contenteditable", "false").lower() not in (
        "false",
        "inherit",
    ):
        return True
    kind = input_type(element)
    return bool(kind) and kind not in INPUT_BUTTONS


def submits(element: Element) -> bool:
    """Whether a press on the element sends its form."""
    if element.tag == "button":
        return element.attributes.get("type", "submit").lower() == "submit"
    return input_type(element) in ("submit", "image")


def number(root: Element) -> dict[int, Element]:
    """Give the innermost clickable elements their labels, 0 and up in reading order."""
    order = list(root.walk())
    outer: set[int] = set()
    for element in order:
        element.label = None
        if element.clickable:
            for above in element.ancestors():
                if above is not element:
                    if above.index in outer:
                        break
                    outer.add(above.index)
    labels: dict[int, Element] = {}
    for element in order:
        if element.clickable and element.index not in outer:
            element.label = len(labels)
            labels[element.label] = element
    return labels


def from_snapshot(raw: dict[str, Any]) -> Page:
    """The page of a browser's snapshot: nested lists of tag, attributes, index, flags, box, field and children."""
    root: Element | None = None
    fields: dict[int, FieldState] = {}
    waiting: list[tuple[list[Any] | str, Element | None]] = [(raw["tree"], None)]
    while waiting:
        item, parent = waiting.pop()
        if isinstance(item, str):
            assert parent is not None
            parent.children.append(item)
            continue
        tag, attributes, index, flags, box, held, children = item
        element = Element(tag, attributes, index, parent)
        element.visible, element.clickable = bool(flags & 1), bool(flags & 2)
        element.box = (box[0], box[1], box[2], box[3]) if box else None
        if held is not None:
            fields[index] = FieldState(str(held[0]), bool(held[1]), int(held[2]))
        if parent is None:
            root = element
        else:
            parent.children.append(element)
        waiting.extend((child, element) for child in reversed(children))
    assert root is not None
    return Page(root, fields, raw["url"], raw["title"], raw["truncated"])
