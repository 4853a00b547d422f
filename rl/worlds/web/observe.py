"""Observations: the simplified HTML that WebRL's agents read, and the accessibility tree that planners read, from
one page model.
"""

from __future__ import annotations

import re

from ...web_pages.tree import Node, write_tree
from .elements import Element, FieldState, Page, collapse, editable, input_type, options_of

LONGEST = 500  # characters of one text or attribute value
HIDDEN_VALUE = "********"  # a password never leaves the page
_PLAIN = ("title", "value", "type", "placeholder", "selected")
_AFTER = ("data-testid", "data-label")
_TAG_SIGNS = re.compile(r"[^\w:.-]")
_ROLE = re.compile(r"[A-Za-z][\w-]*")  # as trees are read back
_SPECIAL = re.compile(r'[<>"]')


def safe(text: str) -> str:
    """A text that cannot be taken for markup. The ampersand stays, as in WebRL's pages."""
    shown = collapse(text)
    if len(shown) > LONGEST:
        shown = shown[:LONGEST].rstrip()
    if _SPECIAL.search(shown):
        shown = shown.replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    return shown


def _attributes(element: Element, held: FieldState | None, boxes: bool) -> list[tuple[str, str]]:
    given, tag = element.attributes, element.tag
    secret = tag == "input" and input_type(element) == "password"
    found = (
        [(name, given[name]) for name in _PLAIN if given.get(name) and not (secret and name == "value")]
        if given
        else []
    )
    status = ""
    if tag == "select":
        options = options_of(element)
        chosen = options[held.chosen] if held and 0 <= held.chosen < len(options) else None
        found += [("data-value", held.value if held else ""), ("data-text", chosen.text if chosen else "")]
    elif tag in ("input", "textarea"):
        if input_type(element) in ("checkbox", "radio"):
            status = "checked" if held and held.checked else "not-checked"
        elif held and held.value:
            found.append(("data-value", HIDDEN_VALUE if secret else held.value))
    else:
        found.append(("data-text", ",".join(element.own_text)))
        if tag == "option" and held and held.checked:
            status = "selected"
    if given:
        found += [(name, given[name]) for name in _AFTER if given.get(name)]
    printed: list[tuple[str, str]] = []
    for name, value in found:
        if value and (value := safe(value)) and all(value != other for _, other in printed):
            printed.append((name, value))
    if boxes and element.box is not None:
        printed.append(("data-bbox", ",".join(str(n) for n in element.box)))
    if status:
        printed.append(("data-status", status))
    return printed


def simplified_html(page: Page, *, boxes: bool = True) -> str:
    """The page as WebRL prints it. Only what meets the viewport is there; a backend without layout has neither boxes
    nor a viewport.
    """
    if not boxes and page.cache is not None and "html" in page.cache:
        return page.cache["html"]
    done: dict[int, list[str]] = {}
    for element in reversed(list(page.root.walk())):  # children come before their parents
        done[element.index] = _parts(page, element, done, boxes)
    text = " ".join(done[page.root.index])
    if not boxes and page.cache is not None:
        page.cache["html"] = text
    return text


def _parts(page: Page, element: Element, done: dict[int, list[str]], boxes: bool) -> list[str]:
    tag, label = element.tag, element.label
    if tag == "input" and input_type(element) == "hidden":
        return []
    below = [part for child in element.children if not isinstance(child, str) and (part := done.pop(child.index))]
    inner = below[0] if len(below) == 1 else [part for parts in below for part in parts]
    if not (element.visible or label is not None or (tag in ("option", "optgroup") and _in_shown_select(element))):
        return inner
    attributes = _attributes(element, page.fields.get(element.index), boxes)
    first = element.children[0] if element.children else ""
    text = safe(first) if isinstance(first, str) and tag != "textarea" else ""
    has_attributes = any(name != "data-bbox" for name, _ in attributes)
    if not (label is not None or text or has_attributes or len(below) > 1 or tag in ("html", "body")):
        return inner
    if label is not None:
        attributes.insert(0, ("id", str(label)))
    if not tag.isalnum():  # a tag may hold almost any sign
        tag = _TAG_SIGNS.sub("-", tag)
    named = "".join(f' {name}="{value}"' for name, value in attributes)
    return [f"<{tag}{named}>", *([text] if text else []), *inner, f"</{tag}>"]


def _in_shown_select(option: Element) -> bool:
    return any(e.tag == "select" and (e.visible or e.label is not None) for e in option.ancestors())


_ROLES = {
    "a": "link", "button": "button", "select": "combobox", "textarea": "textbox", "option": "option", "img": "img",
    "table": "table", "tr": "row", "td": "cell", "th": "columnheader", "ul": "list", "ol": "list", "li": "listitem",
    "nav": "navigation", "main": "main", "header": "banner",
    "footer": "contentinfo", "form": "form", "label": "LabelText", "p": "paragraph",
}  # fmt: skip
_INPUTS = {
    "checkbox": "checkbox",
    "radio": "radio",
    "search": "searchbox",
    "submit": "button",
    "reset": "button",
    "button": "button",
    "image": "button",
}
_NAMED_BY_CONTENT = {"link", "button", "heading", "option", "cell", "columnheader", "tab", "menuitem"}
_SILENT = {
    "form",
    "table",
    "row",
    "list",
    "listitem",
    "navigation",
    "main",
    "banner",
    "contentinfo",
    "paragraph",
    "LabelText",
    "cell",
}


def role_of(element: Element) -> str:
    """The accessibility role of an element, `generic` where it has none."""
    stated = element.attributes.get("role", "").split()  # a list, of which the first known one counts
    if named := next((role for role in stated if _ROLE.fullmatch(role)), None):
        return named
    if element.tag == "input":
        return _INPUTS.get(input_type(element), "textbox")
    if len(element.tag) == 2 and element.tag[0] == "h" and element.tag[1] in "123456":
        return "heading"
    return _ROLES.get(element.tag, "generic")


def name_of(element: Element, labels: dict[str, str]) -> str:
    """The accessible name: aria-label, the label element, the content where the role says so, value, placeholder,
    title.
    """
    attributes = element.attributes
    for name in (attributes.get("aria-label", ""), labels.get(attributes.get("id", ""), "")):
        if name.strip():
            return collapse(name)
    above = next((e for e in element.ancestors() if e.tag == "label"), None)
    if above is not None and above is not element and element.tag in ("input", "select", "textarea") and above.text:
        return " ".join(above.own_text)
    if role_of(element) in _NAMED_BY_CONTENT and element.tag != "input" and element.text:
        return element.text
    if input_type(element) in ("submit", "reset", "button"):
        return collapse(
            attributes.get("value", "") or {"submit": "Submit", "reset": "Reset"}.get(input_type(element), "")
        )
    return collapse(attributes.get("alt", "") or attributes.get("title", "") or attributes.get("placeholder", ""))


def accessibility_nodes(page: Page) -> tuple[list[Node], dict[int, Element]]:
    """The nodes of the accessibility tree and the element of each id. Ids count elements in reading order, so they
    are stable.
    """
    labels = {e.attributes["for"]: e.text for e in page.root.walk() if e.tag == "label" and e.attributes.get("for")}
    nodes, elements = [Node(1, "RootWebArea", page.title, (("focused", "True"),), 0)], {1: page.root}
    waiting: list[tuple[Element | str, int, str, Element]] = [
        (c, 1, "", page.root) for c in reversed(page.root.children)
    ]
    while waiting:
        item, depth, above, parent = waiting.pop()
        if isinstance(item, str):
            text = collapse(item)
            if text and text not in above and parent.visible and parent.tag not in ("option", "textarea", "select"):
                nodes.append(Node(len(nodes) + 1, "StaticText", text[:LONGEST], (), depth))
                elements[nodes[-1].id] = parent
            continue
        option = item.tag in ("option", "optgroup") and any(e.tag == "select" and e.visible for e in item.ancestors())
        if input_type(item) == "hidden":
            continue
        role, name = role_of(item), name_of(item, labels)[:LONGEST]
        kept = (item.visible or option) and role != "generic" and not (role in _SILENT and not name)
        if kept:
            nodes.append(Node(len(nodes) + 1, role, _name(item, name, page), _properties(item, role, page), depth))
            elements[nodes[-1].id] = item
        inner = name if kept else above
        waiting.extend((child, depth + kept, inner, item) for child in reversed(item.children))
    return nodes, elements


def _name(item: Element, name: str, page: Page) -> str:
    held = page.fields.get(item.index)
    if not held or not (editable(item) or item.tag == "select"):
        return name
    options = options_of(item) if item.tag == "select" else []
    value = options[held.chosen].text if 0 <= held.chosen < len(options) else held.value if not options else ""
    return f"{name} {HIDDEN_VALUE if input_type(item) == 'password' and value else value}".strip()[:LONGEST]


def _properties(item: Element, role: str, page: Page) -> tuple[tuple[str, str], ...]:
    held = page.fields.get(item.index)
    properties: list[tuple[str, str]] = []
    if "disabled" in item.attributes:
        properties.append(("disabled", "True"))
    if "required" in item.attributes:
        properties.append(("required", "True"))
    if role in ("checkbox", "radio"):
        properties.append(("checked", "true" if held and held.checked else "false"))
    if item.tag == "option" and held and held.checked:
        properties.append(("selected", "True"))
    if role == "heading" and item.tag[0] == "h":
        properties.append(("level", item.tag[1]))
    return tuple(properties)


def accessibility_tree(page: Page) -> str:
    """The page as lines `[id] role 'name' key: value`, tabs for depth."""
    if page.cache is not None and "tree" in page.cache:
        return page.cache["tree"]
    text = write_tree(accessibility_nodes(page)[0])
    if page.cache is not None:
        page.cache["tree"] = text
    return text
