"""A forgiving reader of JSON as models write it: Python literals, single quotes, stray or missing commas, unclosed
brackets, text around.

Linear in the text and bounded in depth and length, whatever it is given.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_CHARS = 200_000
MAX_DEPTH = 40
_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+')"""
    r"""|(?P<number>-?\d{1,400}(?:\.\d{0,400})?(?:[eE][+-]?\d{1,4})?)"""
    r"""|(?P<word>[A-Za-z_]\w{0,63})|(?P<mark>[{}\[\]:,])|(?P<other>.))""",
    re.DOTALL,
)
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00(?:10|0[0-9a-fA-F])[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


class Unreadable(ValueError):
    """There is no value in the text, or it passes a bound."""


def _string(token: str) -> str:
    def put(found: re.Match[str]) -> str:
        code = found.group(1)
        return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPES.get(code, code)

    if "\\" not in token:
        return token[1:-1]
    # Two escapes may be one character beyond the basic plane.
    return _ESCAPE.sub(put, token[1:-1]).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _Reader:
    def __init__(self, text: str, start: int) -> None:
        self.tokens = _TOKEN.finditer(text, start)
        self.advance()

    def advance(self) -> None:
        found = next(self.tokens, None)
        self.kind = found.lastgroup if found else None
        self.token = found.group(found.lastgroup or 0) if found else ""

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise Unreadable(f"nested deeper than {MAX_DEPTH}")
        kind, token = self.kind, self.token
        if kind is None or token in ("}", "]", ":", ","):
            raise Unreadable("a value is missing")
        self.advance()
        if token == "{":
            return self.mapping(depth + 1)
        if token == "[":
            return self.sequence(depth + 1)
        if kind == "string":
            return _string(token)
        if kind == "number":
            return float(token) if any(c in token for c in ".eE") else int(token)
        if kind == "word":
            return _WORDS.get(token, token)
        raise Unreadable(f"unexpected {token!r}")

    def mapping(self, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        while self.kind is not None and self.token != "}":
            if self.token == ",":
                self.advance()
                continue
            if self.kind not in ("string", "word", "number"):
                raise Unreadable(f"a key cannot be {self.token!r}")
            key = _string(self.token) if self.kind == "string" else self.token
            self.advance()
            if self.token != ":":
                raise Unreadable(f"no colon after the key {key[:40]!r}")
            self.advance()
            out[key] = self.value(depth)
        self.advance()
        return out

    def sequence(self, depth: int) -> list[Any]:
        out: list[Any] = []
        while self.kind is not None and self.token != "]":
            if self.token == ",":
                self.advance()
                continue
            out.append(self.value(depth))
        self.advance()
        return out


def read_mapping(text: str) -> dict[str, Any]:
    """The mapping that starts at the first brace; raises Unreadable when there is none or it passes a bound."""
    if len(text) > MAX_CHARS:
        raise Unreadable(f"longer than {MAX_CHARS} characters")
    start = text.find("{")
    if start < 0:
        raise Unreadable("no brace")
    try:
        value, _ = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        value = _Reader(text, start).value(0)
    if not isinstance(value, dict):
        raise Unreadable("not a mapping")
    return value
