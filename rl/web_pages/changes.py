"""What changed between two pages: new, deleted and updated items, by a cheapest matching of their nodes.

Nodes are matched within a role. The cost of a pair adds the distance of the names (by words), of the properties, and a
price for another id; leaving a node out has a price too, so that a pair that has little in common is one deleted and
one new item. A pair that only differs in its id is no change: browsers renumber nodes when a page is loaded again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..rewards.web_page import HEADERS
from .assignment import assign
from .tree import Node, parse_tree

ID_PRICE, NAME_PRICE, PROPERTY_PRICE, UNMATCHED_PRICE = 1.2, 1.5, 0.5, 1.25
MAX_MATRIX = 1000  # nodes of one role that are matched by cost; more are matched by content alone
NONE = "None"


@dataclass(frozen=True)
class Changes:
    """Items as lines: new and updated ones as the next page has them, deleted ones as the old page had them."""

    new: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.new or self.deleted or self.updated)

    def write(self) -> str:
        """The three sections of an answer; an empty one holds the line None."""
        sections = (self.new, self.deleted, self.updated)
        return "\n\n".join(
            "\n".join((header, *(items or (NONE,)))) for header, items in zip(HEADERS, sections, strict=True)
        )


def jaccard(a: frozenset, b: frozenset) -> float:
    """One minus the share of common members: 0 for equal sets, 1 for disjoint ones."""
    return 1.0 - len(a & b) / len(a | b) if a or b else 0.0


def pair_cost(a: Node, b: Node) -> float:
    """A metric on the nodes of one role, so that equal nodes may be paired before anything else without loss."""
    words = jaccard(frozenset(a.name.split()), frozenset(b.name.split())) if a.name != b.name else 0.0
    name = max(words, 0.1) if a.name != b.name else 0.0  # other order or spacing of the same words still costs
    return (
        ID_PRICE * (a.id != b.id)
        + NAME_PRICE * name
        + PROPERTY_PRICE * jaccard(frozenset(a.properties), frozenset(b.properties))
    )


def match(old: Sequence[Node], new: Sequence[Node]) -> list[tuple[Node, Node]]:
    """Pairs of old and new nodes with the smallest total price."""
    pairs: list[tuple[Node, Node]] = []
    by_key = {(n.id, n.content): n for n in new}
    rest_old: dict[str, list[Node]] = defaultdict(list)
    for node in old:
        same = by_key.pop((node.id, node.content), None)
        if same is not None:
            pairs.append((node, same))
        else:
            rest_old[node.role].append(node)
    rest_new: dict[str, list[Node]] = defaultdict(list)
    for node in by_key.values():
        rest_new[node.role].append(node)
    for role, members in rest_old.items():
        pairs += _match_role(members, rest_new.get(role, []))
    return pairs


def _match_role(old: list[Node], new: list[Node]) -> list[tuple[Node, Node]]:
    if not old or not new:
        return []
    if max(len(old), len(new)) > MAX_MATRIX:
        return _match_content(old, new)
    # A dummy column for each old node makes leaving it out possible; a new node left out is a column nobody takes.
    cost = np.array([[pair_cost(a, b) for b in new] + [2 * UNMATCHED_PRICE] * len(old) for a in old])
    chosen = assign(cost)
    return [
        (a, new[c])
        for a, c in zip(old, chosen, strict=True)
        if c < len(new) and pair_cost(a, new[c]) < 2 * UNMATCHED_PRICE
    ]


def _match_content(old: list[Node], new: list[Node]) -> list[tuple[Node, Node]]:
    pairs: list[tuple[Node, Node]] = []
    waiting: dict[object, list[Node]] = defaultdict(list)
    for node in reversed(new):
        waiting[node.content].append(node)
    for node in old:
        if waiting[node.content]:
            pairs.append((node, waiting[node.content].pop()))
    by_id = {n.id: n for left in waiting.values() for n in left}
    paired = {a.id for a, _ in pairs}
    return pairs + [(a, by_id.pop(a.id)) for a in old if a.id not in paired and a.id in by_id]


def changes_between(old: Sequence[Node], new: Sequence[Node]) -> Changes:
    """New, deleted and updated items, each in the reading order of its page."""
    pairs = match(old, new)
    from_old, from_new = {a.id for a, _ in pairs}, {b.id for _, b in pairs}
    updated = {b.id for a, b in pairs if a.content != b.content}
    return Changes(
        tuple(n.line for n in new if n.id not in from_new),
        tuple(n.line for n in old if n.id not in from_old),
        tuple(n.line for n in new if n.id in updated),
    )


def page_changes(old: str, new: str) -> Changes:
    """The changes between two pages given as text."""
    return changes_between(parse_tree(old), parse_tree(new))
