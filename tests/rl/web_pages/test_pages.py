"""Trees, matching and change lists: round trips, the assignment against brute force, every kind of change."""

import itertools
import random
import time
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrella.rl.rewards.web_page import NOTHING, judge
from terrella.rl.web_pages.assignment import assign
from terrella.rl.web_pages.changes import UNMATCHED_PRICE, Changes, changes_between, match, page_changes, pair_cost
from terrella.rl.web_pages.prompt import PageTransition, page_prompt
from terrella.rl.web_pages.tree import BadTree, Node, parse_line, parse_tree, write_tree

PAGE = """Tab 0 (current): Shop

[1] RootWebArea 'Shop' focused: True
\t[5] link 'My Cart'
\t\t[6] StaticText '3 items'
\t[8] textbox "What's new" required: False hasPopup: listbox
\t[9] button 'Buy' describedby: price and size
"""


def test_parse() -> None:
    nodes = parse_tree(PAGE)
    assert [n.depth for n in nodes] == [0, 1, 2, 1, 1]
    assert nodes[3] == Node(8, "textbox", "What's new", (("required", "False"), ("hasPopup", "listbox")), 1)
    assert nodes[4].properties == (("describedby", "price and size"),)
    assert write_tree(nodes) == PAGE.split("\n\n")[1].rstrip("\n")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1] link 'a'\n[1] link 'b'", "line 2: id 1 appears twice"),
        ("[1] link 'a'\n\t\t[2] link 'b'", "line 2: depth 2 has no parent"),
        ("[1] link 'a'\nrubbish", "line 2: no node"),
        ("[1] link 'a' rubbish", "no list of `key: value`"),
        ("[1] link 'a\\xzz'", "is no quoted text"),
        ("[1] link 'a", "no node"),
        ("[" * 100_000, "no node"),
        ("[1] link '" + "\\" * 100_001, "no node"),
    ],
)
def test_bad_trees_are_named(text: str, reason: str) -> None:
    begun = time.process_time()
    with pytest.raises(BadTree, match=reason):
        parse_tree(text)
    assert time.process_time() - begun < 1


KEYS = st.sampled_from(["focused", "required", "hasPopup", "expanded"])
NODES = st.builds(
    lambda role, name, props: (role, name, tuple(props.items())),
    st.sampled_from(["link", "button", "StaticText", "menu-item"]),
    st.text(max_size=12),
    st.dictionaries(KEYS, st.sampled_from(["True", "False", "a b", "x/y"]), max_size=3),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(NODES, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_round_trip(contents: list, rng: random.Random) -> None:
    depth, nodes = -1, []
    for i, (role, name, properties) in enumerate(contents):
        depth = rng.randint(0, depth + 1)
        nodes.append(Node(i + 1, role, name, properties, depth))
    assert parse_tree(write_tree(nodes)) == nodes
    assert [parse_line(n.line).content for n in nodes] == [n.content for n in nodes]


@pytest.mark.parametrize("seed", range(60))
def test_assignment_equals_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 6))
    columns = int(rng.integers(rows, 7))
    cost = rng.integers(0, 5, (rows, columns)).astype(float) if seed % 2 else rng.normal(size=(rows, columns))
    chosen = assign(cost)
    assert len(set(chosen)) == rows
    best = min(sum(cost[r, c] for r, c in enumerate(p)) for p in itertools.permutations(range(columns), rows))
    assert sum(cost[r, c] for r, c in enumerate(chosen)) == pytest.approx(best)


def test_assignment_refuses() -> None:
    with pytest.raises(ValueError, match="transpose"):
        assign(np.zeros((3, 2)))
    with pytest.raises(ValueError, match="finite"):
        assign(np.array([[np.nan]]))


def price(pairs: list[tuple[Node, Node]], old: list[Node], new: list[Node]) -> float:
    return sum(pair_cost(a, b) for a, b in pairs) + UNMATCHED_PRICE * (len(old) + len(new) - 2 * len(pairs))


def brute(old: list[Node], new: list[Node]) -> float:
    """The best price over every partial matching within roles."""
    if not old:
        return UNMATCHED_PRICE * len(new)
    first, rest = old[0], old[1:]
    options = [UNMATCHED_PRICE + brute(rest, new)]
    for i, other in enumerate(new):
        if other.role == first.role:
            options.append(pair_cost(first, other) + brute(rest, new[:i] + new[i + 1 :]))
    return min(options)


@pytest.mark.parametrize("seed", range(60))
def test_matching_is_the_cheapest(seed: int) -> None:
    rng = random.Random(seed)

    def page() -> list[Node]:
        ids = rng.sample(range(1, 8), rng.randint(0, 5))
        return [
            Node(
                i,
                rng.choice(["link", "button"]),
                " ".join(rng.choices(["buy", "now", "cart", "3"], k=rng.randint(0, 3))),
                (("on", rng.choice("TF")),) * rng.randint(0, 1),
            )
            for i in ids
        ]

    old, new = page(), page()
    pairs = match(old, new)
    assert len({a.id for a, _ in pairs}) == len({b.id for _, b in pairs}) == len(pairs)
    assert price(pairs, old, new) == pytest.approx(brute(old, new))


def test_kinds_of_change() -> None:
    after = """[1] RootWebArea 'Shop' focused: True
\t[5] link 'My Cart'
\t\t[6] StaticText '4 items'
\t[8] textbox "What's new" required: False hasPopup: listbox
\t[12] StaticText 'Added to the cart'
"""
    assert page_changes(PAGE, after) == Changes(
        ("[12] StaticText 'Added to the cart'",),
        ("[9] button 'Buy' describedby: price and size",),
        ("[6] StaticText '4 items'",),
    )
    assert page_changes(PAGE, PAGE) == Changes() and Changes().write() == NOTHING and Changes().empty


def test_renumbering_alone_is_no_change() -> None:
    shifted = [Node(n.id + 100, n.role, n.name, n.properties, n.depth) for n in parse_tree(PAGE)]
    assert changes_between(parse_tree(PAGE), shifted).empty


def test_deleted_items_are_those_of_the_old_page() -> None:
    """Deleting the first of three equal rows must not lose or invent one, whatever the ids are."""
    old = [Node(i, "link", "row") for i in (1, 2, 3)] + [Node(4, "link", "other")]
    new = [Node(i, "link", "row") for i in (11, 12)] + [Node(13, "link", "other")]
    changed = changes_between(old, new)
    assert changed.new == changed.updated == () and len(changed.deleted) == 1 and changed.deleted[0].endswith("'row'")
    assert changes_between(old, []).deleted == tuple(n.line for n in old)
    assert changes_between([], old).new == tuple(n.line for n in old)


def test_the_true_list_scores_one_and_big_pages_are_bounded() -> None:
    rng = random.Random(0)
    old = [
        Node(i, rng.choice(["link", "StaticText", "cell"]), f"item {rng.randint(0, 60)} of {i % 7}")
        for i in range(1, 700)
    ]
    new = [Node(n.id + rng.choice([0, 1000]), n.role, n.name.replace("3", "4")) for n in old if rng.random() < 0.9]
    begun = time.process_time()
    text = changes_between(old, new).write()
    assert time.process_time() - begun < 20
    assert judge(text, text).reward == judge(text, text, "strict").reward == 1.0
    huge = [Node(i, "cell", f"v {i}") for i in range(3000)]
    moved = [Node(n.id + 5000 * (n.id % 2), "cell", n.name if n.id else "other") for n in huge]
    begun = time.process_time()
    assert changes_between(huge, moved) == Changes((), (), ("[0] cell 'other'",))
    assert time.process_time() - begun < 5


def test_prompt_and_row() -> None:
    step = PageTransition("http://shop", "buy", "", PAGE, "click [9]", PAGE)
    text = page_prompt(step)
    at = 0
    for mark in (
        "click [id]",
        "New items:",
        "Updated items:",
        "URL: http://shop",
        "OBJECTIVE: buy",
        "PREVIOUS ACTION: None",
        PAGE,
        "CURRENT ACTION: click [9]",
    ):
        at = text.index(mark, at)
    assert PageTransition.from_row(asdict(step)) == step and step.changes.empty
    with pytest.raises(ValueError, match="'action'"):
        PageTransition.from_row({**asdict(step), "action": 3})
