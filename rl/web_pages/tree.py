"""Accessibility trees as text: one node a line, `[id] role 'name' key: value ...`, tabs for depth."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass

_LINE = re.compile(
    r"""(?P<tabs>\t*)\[(?P<id>\d{1,12})\]\ (?P<role>[A-Za-z][\w-]*)\ """
    r"""(?P<name>'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+")(?:\ (?P<rest>.+))?""",
    re.VERBOSE,
)
_KEY = re.compile(r"(?:^| )([A-Za-z][\w-]*):(?: |$)")


class BadTree(ValueError):
    """A line that is no node; the message names it."""


@dataclass(frozen=True)
class Node:
    """One element of a page. Properties keep their order."""

    id: int
    role: str
    name: str
    properties: tuple[tuple[str, str], ...] = ()
    depth: int = 0

    @property
    def line(self) -> str:
        """The node as an item of an answer, without its depth."""
        properties = " ".join(f"{key}: {value}" for key, value in self.properties)
        return f"[{self.id}] {self.role} {self.name!r}" + (f" {properties}" if properties else "")

    @property
    def content(self) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        """What makes two nodes the same to a reader: all but the id and the depth."""
        return self.role, self.name, self.properties


def parse_line(text: str) -> Node:
    """One line as a node."""
    found = _LINE.fullmatch(text)
    if found is None:
        raise BadTree(f"no node: {text[:80]!r}")
    try:
        name = ast.literal_eval(found["name"])
    except (ValueError, SyntaxError) as error:
        raise BadTree(f"the name of {text[:80]!r} is no quoted text: {error}") from error
    return Node(int(found["id"]), found["role"], name, _properties(found["rest"] or "", text), len(found["tabs"]))


def _properties(rest: str, line: str) -> tuple[tuple[str, str], ...]:
    if not rest:
        return ()
    keys = list(_KEY.finditer(rest))
    if not keys or keys[0].start() != 0:
        raise BadTree(f"{rest[:40]!r} in {line[:80]!r} is no list of `key: value`")
    ends = [k.start() for k in keys[1:]] + [len(rest)]
    return tuple((k[1], rest[k.end() : end]) for k, end in zip(keys, ends, strict=True))


def parse_tree(text: str) -> list[Node]:
    """The nodes of a page in reading order. Lines before the first node (the browser's tabs) and blank lines are
    left out.
    """
    nodes: list[Node] = []
    seen: set[int] = set()
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or (not nodes and not line.lstrip().startswith("[")):
            continue
        try:
            node = parse_line(line.rstrip())
        except BadTree as error:
            raise BadTree(f"line {number}: {error}") from error
        if node.id in seen:
            raise BadTree(f"line {number}: id {node.id} appears twice")
        if node.depth > (nodes[-1].depth + 1 if nodes else 0):
            raise BadTree(f"line {number}: depth {node.depth} has no parent")
        seen.add(node.id)
        nodes.append(node)
    return nodes


def items_f1(one: str, other: str) -> float:
    """F1 of the items of two pages by their contents, 1 for pages that read the same: lists of changes say neither
    order nor depth, and a browser may number an item anew."""
    left, right = (Counter(node.content for node in parse_tree(page)) for page in (one, other))
    return 2 * (left & right).total() / max(left.total() + right.total(), 1)


def write_tree(nodes: list[Node]) -> str:
    """The page as text; `parse_tree` reads it back."""
    return "\n".join("\t" * node.depth + node.line for node in nodes)
