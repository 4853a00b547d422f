"""Scripted oracles of MiniWoB++ pages: each reads the instruction and the page at hand and gives the next action."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..base import WorldFault
from .actions import WebAction
from .elements import Element, Page, editable

Oracle = Callable[[str, Page, int], WebAction]
ORACLES: dict[str, Oracle] = {}


def oracle(*names: str) -> Callable[[Oracle], Oracle]:
    """Register an oracle for some pages."""

    def register(function: Oracle) -> Oracle:
        ORACLES.update(dict.fromkeys(names, function))
        return function

    return register


def next_action(name: str, intent: str, page: Page, step: int) -> WebAction:
    """The next action on a page."""
    if name not in ORACLES:
        raise WorldFault(f"web: no oracle for the MiniWoB++ page {name}")
    return ORACLES[name](intent, page, step)


def _quoted(intent: str) -> list[str]:
    return re.findall(r'"([^"]*)"', intent)


def _click(page: Page, text: str, *tags: str) -> WebAction:
    found = next(
        (
            n
            for n, e in page.labels.items()
            if (not tags or e.tag in tags) and text in (e.text, e.attributes.get("value"))
        ),
        None,
    )
    if found is None:
        raise WorldFault(f"web: nothing to click reads {text!r}")
    return WebAction("click", found)


def _shows(page: Page, text: str, *tags: str) -> bool:
    return any(e.tag in tags and e.text == text for e in page.labels.values())


def _fields(page: Page) -> list[int]:
    return [n for n, e in page.labels.items() if editable(e)]


def _value(page: Page, label: int) -> str:
    held = page.fields.get(page.labels[label].index)
    return held.value if held else ""


def _fill(page: Page, wanted: dict[int, str], submit: str = "Submit") -> WebAction:
    """Type into the first field that does not hold its text; then press the button."""
    for label, text in wanted.items():
        if _value(page, label) != text:
            return WebAction("type", label, text)
    return _click(page, submit, "button", "input")


def _body(page: Page) -> list[Element]:
    """The elements below the instruction."""
    return [e for e in page.root.walk() if not any(a.attributes.get("id") == "query" for a in e.ancestors())]


@oracle("click-test", "click-test-2", "click-test-transfer", "click-button", "unicode-test")
def one_button(intent: str, page: Page, step: int) -> WebAction:
    names = _quoted(intent) or re.findall(r"button (\w+)\.$", intent)
    return (
        _click(page, names[0], "button")
        if names
        else WebAction("click", next(n for n, e in page.labels.items() if e.tag == "button"))
    )


@oracle("click-button-sequence")
def sequence(intent: str, page: Page, step: int) -> WebAction:
    return _click(page, ("ONE", "TWO")[step], "button")


@oracle("click-link")
def one_link(intent: str, page: Page, step: int) -> WebAction:
    return _click(page, _quoted(intent)[0], "span", "a")


@oracle("click-dialog", "click-dialog-2")
def dialog(intent: str, page: Page, step: int) -> WebAction:
    wanted = _quoted(intent)[-1]
    for label, element in page.labels.items():
        close = any("ui-dialog-titlebar-close" in e.attributes.get("class", "") for e in element.ancestors())
        if close if wanted == "x" else element.text == wanted:
            return WebAction("click", label)
    raise WorldFault("web: the dialog has no such button")


def _boxes(page: Page) -> list[tuple[int, str, bool]]:
    found = []
    for label, element in page.labels.items():
        if element.attributes.get("type") in ("checkbox", "radio"):
            name = next((e.text for e in element.ancestors() if e.tag == "label"), "")
            found.append((label, name, page.fields[element.index].checked))
    return found


@oracle("click-checkboxes", "click-checkboxes-transfer", "click-checkboxes-large", "click-option")
def boxes(intent: str, page: Page, step: int) -> WebAction:
    found = re.fullmatch(r"Select (.*) and click Submit\.", intent)
    wanted = set(found[1].split(", ")) if found else set()
    for label, name, ticked in _boxes(page):
        if name in wanted and not ticked:
            return WebAction("click", label)
    return _click(page, "Submit", "button")


@oracle("choose-list")
def choose_list(intent: str, page: Page, step: int) -> WebAction:
    wanted = re.sub(r"^Select (.*) from the list.*$", r"\1", intent)
    label, element = next((n, e) for n, e in page.labels.items() if e.tag == "select")
    return (
        WebAction("select", label, wanted)
        if page.fields[element.index].value != wanted
        else _click(page, "Submit", "button")
    )


@oracle("enter-text", "enter-text-dynamic")
def enter_text(intent: str, page: Page, step: int) -> WebAction:
    return _fill(page, {_fields(page)[0]: _quoted(intent)[0]})


@oracle("enter-text-2")
def enter_case(intent: str, page: Page, step: int) -> WebAction:
    text = _quoted(intent)[0]
    return _fill(page, {_fields(page)[0]: text.upper() if "upper case" in intent else text.lower()})


@oracle("enter-password")
def enter_password(intent: str, page: Page, step: int) -> WebAction:
    return _fill(page, dict.fromkeys(_fields(page), _quoted(intent)[0]))


@oracle("login-user")
def login_user(intent: str, page: Page, step: int) -> WebAction:
    return _fill(page, dict(zip(_fields(page), _quoted(intent), strict=True)), "Login")


@oracle("enter-date")
def enter_date(intent: str, page: Page, step: int) -> WebAction:
    month, day, year = re.findall(r"\d+", intent)
    return _fill(page, {_fields(page)[0]: f"{year}-{month}-{day}"})


@oracle("enter-time")
def enter_time(intent: str, page: Page, step: int) -> WebAction:
    hour, minute, half = re.findall(r"(\d+):(\d+) ([AP]M)", intent)[0]
    return _fill(page, {_fields(page)[0]: f"{int(hour) % 12 + 12 * (half == 'PM'):02d}:{minute}"})


@oracle("focus-text", "focus-text-2")
def focus(intent: str, page: Page, step: int) -> WebAction:
    position = re.findall(r"(\d+)(?:st|nd|rd|th)", intent)
    return WebAction("click", _fields(page)[int(position[0]) - 1 if position else 0])


@oracle("click-tab")
def tab(intent: str, page: Page, step: int) -> WebAction:
    return _click(page, re.findall(r"Tab #\d+", intent)[0], "a")


@oracle("click-tab-2", "click-tab-2-easy", "click-tab-2-medium", "click-tab-2-hard")
def tabs(intent: str, page: Page, step: int) -> WebAction:
    wanted = _quoted(intent)[0]
    if _shows(page, wanted, "span"):
        return _click(page, wanted, "span")
    return WebAction("click", [n for n, e in page.labels.items() if e.tag == "a"][step + 1])


@oracle("click-collapsible", "click-collapsible-nodelay")
def collapsible(intent: str, page: Page, step: int) -> WebAction:
    return (
        WebAction("click", next(n for n, e in page.labels.items() if e.tag == "h3"))
        if step == 0
        else _click(page, "Submit", "button")
    )


@oracle("click-collapsible-2-nodelay")
def collapsibles(intent: str, page: Page, step: int) -> WebAction:
    wanted = _quoted(intent)[0]
    if _shows(page, wanted, "span"):
        return _click(page, wanted, "span")
    return WebAction("click", [n for n, e in page.labels.items() if e.tag == "h3"][step])


@oracle("click-widget")
def widget(intent: str, page: Page, step: int) -> WebAction:
    wanted = _quoted(intent)[0]
    for label, element in page.labels.items():
        kind = element.attributes.get("type", "text") if element.tag == "input" else element.tag
        if kind == wanted or (wanted == "text" and kind == "input"):
            return WebAction("click", label)
    raise WorldFault(f"web: no {wanted} widget")


@oracle("simple-arithmetic")
def arithmetic(intent: str, page: Page, step: int) -> WebAction:
    match = next(m for e in _body(page) if (m := re.fullmatch(r"(-?\d+) ([x*/+-]) (-?\d+) =", e.text)))
    a, b = int(match[1]), int(match[3])
    result = {"x": a * b, "*": a * b, "+": a + b, "-": a - b, "/": a // b if b else 0}[match[2]]
    return _fill(page, {_fields(page)[0]: str(result)})


@oracle("simple-algebra")
def algebra(intent: str, page: Page, step: int) -> WebAction:
    equation = next(e.text for e in _body(page) if re.fullmatch(r"\S+ [+-] \S+ = -?\d+", e.text))
    a, sign, b, _, c = equation.split()
    if re.fullmatch(r"-?\d+", a):  # number, sign, unknown
        result = int(c) - int(a) if sign == "+" else int(a) - int(c)
    else:
        result = int(c) - int(b) if sign == "+" else int(c) + int(b)
    return _fill(page, {_fields(page)[0]: str(result)})


def _table(page: Page) -> dict[str, str]:
    rows = [[c.text for c in e.walk() if c.tag in ("td", "th")] for e in _body(page) if e.tag == "tr"]
    return {row[0]: row[1] for row in rows if len(row) == 2}


@oracle("read-table")
def read_table(intent: str, page: Page, step: int) -> WebAction:
    return _fill(
        page,
        {_fields(page)[0]: _table(page)[re.sub(r"^Enter the value of (.*) into the text field.*$", r"\1", intent)]},
    )


@oracle("read-table-2")
def read_table_2(intent: str, page: Page, step: int) -> WebAction:
    labels = [e.text.rstrip(":") for e in _body(page) if e.tag == "label"]
    return _fill(page, {n: _table(page)[name] for n, name in zip(_fields(page), labels, strict=True)})


@oracle("find-word")
def find_word(intent: str, page: Page, step: int) -> WebAction:
    position = int(re.findall(r"(\d+)(?:st|nd|rd|th)", intent)[0])
    words = next(e.text for e in _body(page) if e.tag == "p").split()
    return _fill(page, {_fields(page)[0]: words[position - 1].strip(".,")})


@oracle("odd-or-even")
def odd_or_even(intent: str, page: Page, step: int) -> WebAction:
    numbers = [int(e.text) for e in _body(page) if re.fullmatch(r"-?\d+", e.text) and not e.below]
    if step >= len(numbers):
        return _click(page, "Submit", "button")
    wanted = "Odd" if numbers[step] % 2 else "Even"
    return WebAction("click", [n for n, e in page.labels.items() if e.text == wanted][step])


@oracle("phone-book")
def phone_book(intent: str, page: Page, step: int) -> WebAction:
    name, what = re.findall(r"Find (\S+) in the contact book and click on their (.*)\.", intent)[0]
    if not any(e.tag == "h2" and e.text == name for e in _body(page)):
        return _click(page, ">", "a")
    links = [n for n, e in page.labels.items() if e.tag == "a"]
    return WebAction("click", links[("phone number", "email", "address").index(what)])


@oracle("text-transform")
def text_transform(intent: str, page: Page, step: int) -> WebAction:
    letters = [e.text for e in _body(page) if e.tag == "span" and len(e.text) == 1]
    return _fill(page, {_fields(page)[0]: "".join(letters)})


@oracle("scroll-text", "copy-paste", "copy-paste-2")
def from_area(intent: str, page: Page, step: int) -> WebAction:
    areas = [_value(page, n) for n, e in page.labels.items() if e.tag == "textarea"]
    position = re.findall(r"(\d+)(?:st|nd|rd|th)", intent)
    text = areas[int(position[0]) - 1 if position else 0]
    text = text.split()[-1].rstrip(".") if "last word" in intent else text
    return _fill(page, {next(n for n, e in page.labels.items() if e.tag == "input"): text})


@oracle("use-autocomplete", "use-autocomplete-nodelay")
def autocomplete(intent: str, page: Page, step: int) -> WebAction:
    start, *end = _quoted(intent)
    field = _fields(page)[0]
    if step == 0:
        return WebAction("type", field, start)
    value = _value(page, field)
    if value.startswith(start) and (not end or value.endswith(end[0])) and len(value) > len(start):
        return _click(page, "Submit", "button")
    for label, element in page.labels.items():
        if (
            element.tag not in ("input", "label", "button")
            and element.text.startswith(start)
            and (not end or element.text.endswith(end[0]))
        ):
            return WebAction("click", label)
    return WebAction("wait")
