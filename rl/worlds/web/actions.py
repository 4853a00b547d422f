"""What an agent may write: WebRL's calls, and the bracketed actions of accessibility-tree agents. Text is parsed,
never evaluated.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "click", "hover", "right_click", "type", "search", "select", "scroll_up", "scroll_down", "press", "back", "forward",
    "new_tab", "switch_tab", "close_tab", "goto", "wait", "exit", "none",
]  # fmt: skip
LONGEST = 8000  # characters of one call; longer ones are refused, so that parsing takes a bounded time
_NAMES: dict[str, Kind] = {
    "click": "click",
    "right click": "right_click",
    "hover": "hover",
    "type": "type",
    "search": "search",
    "select dropdown option": "select",
    "scroll up": "scroll_up",
    "scroll down": "scroll_down",
    "press enter": "press",
    "go backward": "back",
    "go forward": "forward",
    "switch tab": "switch_tab",
    "wait": "wait",
}
NEEDS_ELEMENT = {"click", "right_click", "hover", "type", "search", "select"}
NEEDS_TEXT = {"type", "search", "select", "switch_tab", "goto"}
_CALLS = ("exit", "do", "go_backward", "go_forward")
_KEYWORDS = {"exit": {"message"}, "do": {"action", "argument", "element"}, "go_backward": set(), "go_forward": set()}


class NotAnAction(ValueError):
    """A text that holds no action; the message says why."""


@dataclass(frozen=True)
class WebAction:
    """One action. `element` is an id of the observation; `text` is an argument, keys, an address, a tab or the
    answer.
    """

    kind: Kind
    element: int | None = None
    text: str = ""
    comments: tuple[str, ...] = ()  # the lines that begin with #, which stay in the history
    error: str = ""  # why there is no action, for the kind `none`

    @property
    def call(self) -> str:
        """The canonical text, which `parse_call` reads back (kinds of the bracket grammar alone have no call)."""
        if self.kind == "exit":
            return f"exit(message={_quoted(self.text)})"
        name = next(name for name, kind in _NAMES.items() if kind == self.kind)
        words = [f'action="{name.title()}"']
        if self.kind in NEEDS_TEXT:
            words.append(f"argument={_quoted(self.text)}")
        if self.element is not None:
            words.append(f'element="{self.element}"')
        return f"do({', '.join(words)})"


def _quoted(text: str) -> str:
    escaped = (
        text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r").replace("\0", "\\0")
    )
    return f'"{escaped}"'


def parse_call(text: str) -> WebAction:
    """The action of a WebRL response: the last `exit(`, else `do(`, else `go_backward(` or `go_forward(`; else kind
    `none`.
    """
    comments = tuple(line.strip() for line in text.split("\n") if line.lstrip().startswith("#"))
    first_error = ""
    for name in _CALLS:
        at = text.rfind(f"{name}(")
        if at < 0:
            continue
        try:
            action = _call(name, _balanced(text[at:]))
            return WebAction(action.kind, action.element, action.text, comments)
        except NotAnAction as error:
            first_error = first_error or str(error)
    return WebAction("none", comments=comments, error=first_error or "no call of do(...) or exit(...)")


def _balanced(text: str) -> str:
    """The call at the start of `text`, up to the parenthesis that closes it."""
    depth, quote, skip = 0, "", False
    for at, sign in enumerate(text[: LONGEST + 1]):
        if skip:
            skip = False
        elif quote:
            skip, quote = sign == "\\", "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign == "(":
            depth += 1
        elif sign == ")":
            depth -= 1
            if depth == 0:
                return text[: at + 1]
    raise NotAnAction(f"the call is not closed within {LONGEST} characters")


def _call(name: str, text: str) -> WebAction:
    try:
        tree = ast.parse(text.replace("\0", ""), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotAnAction(f"not a call: {type(error).__name__}") from None
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or tree.func.id != name or tree.args:
        raise NotAnAction(f"{name}(...) takes keyword arguments only")
    values: dict[str, str] = {}
    for word in tree.keywords:
        if word.arg is None or word.arg not in _KEYWORDS[name]:
            raise NotAnAction(f"{name}(...) has no argument {word.arg}")
        if not isinstance(word.value, ast.Constant) or not isinstance(word.value.value, str | int | float):
            raise NotAnAction(f"{word.arg} must be a plain text or number")
        values[word.arg] = _plain(word.value.value)
    if name == "exit":
        return WebAction("exit", text=values.get("message", ""))
    if name != "do":
        return WebAction("back" if name == "go_backward" else "forward")
    kind = _NAMES.get(values.get("action", "").strip().lower())
    if kind is None:
        raise NotAnAction(f"no action {values.get('action', '')[:40]!r}")
    argument = values.get("argument", "")
    if kind == "press":
        argument = "Enter"
    if kind == "switch_tab" and not argument:
        argument = values.get("element", "")
    return checked(kind, values.get("element") if kind in NEEDS_ELEMENT else None, argument)


def _plain(value: str | int | float) -> str:
    """An argument as text that can be sent and stored: a character escaped as two halves, as in JSON, is put together;
    a half alone becomes U+FFFD."""
    try:
        text = str(value)
    except ValueError:  # a hexadecimal number of thousands of digits
        raise NotAnAction("an argument is too long a number") from None
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def checked(kind: Kind, element: str | None, text: str) -> WebAction:
    """An action whose parts fit its kind, or NotAnAction."""
    number = None
    if kind in NEEDS_ELEMENT:
        digits = (element or "").strip()
        if not (digits.isascii() and digits.isdigit() and len(digits) < 8):
            raise NotAnAction(f"{kind} needs the id of an element, not {digits[:20]!r}")
        number = int(digits)
    if kind == "switch_tab" and not (text.strip().isascii() and text.strip().isdigit() and len(text) < 5):
        raise NotAnAction(f"switch_tab needs the number of a tab, not {text[:20]!r}")
    if kind == "goto" and not text.strip():
        raise NotAnAction("goto needs an address")
    return WebAction(kind, number, text)


_FENCE = re.compile(r"```(.{1,8000}?)```", re.DOTALL)
_BRACKETS: list[tuple[re.Pattern[str], Kind]] = [
    (re.compile(r"click ?\[(?P<id>\d{1,7})\]"), "click"),
    (re.compile(r"hover ?\[(?P<id>\d{1,7})\]"), "hover"),
    (re.compile(r"type ?\[(?P<id>\d{1,7})\] ?\[(?P<text>.*)\] ?\[(?P<enter>[01])\]", re.DOTALL), "type"),
    (re.compile(r"type ?\[(?P<id>\d{1,7})\] ?\[(?P<text>.*)\]", re.DOTALL), "type"),
    (re.compile(r"press ?\[(?P<text>[\w+\- ]{1,40})\]"), "press"),
    (re.compile(r"scroll ?\[(?:direction=)?(?P<way>down|up)\]"), "scroll_down"),
    (re.compile(r"new_tab"), "new_tab"),
    (re.compile(r"tab_focus ?\[(?P<text>\d{1,4})\]"), "switch_tab"),
    (re.compile(r"close_tab"), "close_tab"),
    (re.compile(r"goto ?\[(?P<text>[^\s\]]{1,2000})\]"), "goto"),
    (re.compile(r"go_back"), "back"),
    (re.compile(r"go_forward"), "forward"),
    (re.compile(r"stop ?\[(?P<text>.*)\]", re.DOTALL), "exit"),
    (re.compile(r"stop"), "exit"),
]


def parse_brackets(text: str) -> WebAction:
    """The action of an accessibility-tree agent: the last text in triple back-ticks, or the whole text when it has
    none.

    `type` presses Enter unless its last bracket is 0, so it becomes the kind `search` then.
    """
    fenced = _FENCE.findall(text[-4 * LONGEST :])
    command = (fenced[-1] if fenced else text[:LONGEST]).strip()
    for pattern, kind in _BRACKETS:
        found = pattern.fullmatch(command)
        if found is None:
            continue
        parts = found.groupdict()
        if kind == "scroll_down" and parts["way"] == "up":
            kind = "scroll_up"
        if kind == "type" and parts.get("enter") != "0":
            kind = "search"
        element = parts.get("id")
        return WebAction(kind, int(element) if element else None, parts.get("text") or "")
    return WebAction("none", error=f"no action in {command[:60]!r}")
