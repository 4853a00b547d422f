"""WebShop: search, pages, the reward by hand, goals of our own and of the public files."""

import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrella.rl.worlds.webshop import WebShop, split_range
from terrella.rl.worlds.webshop_catalog import Goal, Product, load_goals, load_products, make_catalog
from terrella.rl.worlds.webshop_score import Bm25, nouns, purchase_reward, ratio, token_set_ratio, type_score

MUG = Product(
    "A1",
    "Brisk Mug, Ceramic",
    12.0,
    "Home › Dining › Mugs",
    "coffee mugs",
    "A mug.",
    ("Dishwasher safe.",),
    ("ceramic",),
    {"color": ("red",)},
)
GOAL = Goal(
    "A1",
    "Find me mugs",
    "Brisk Mug, Ceramic",
    "Home › Dining › Mugs",
    "coffee mugs",
    20.0,
    ("ceramic", "dishwasher safe"),
    {"color": "red"},
)


def test_bm25_prefers_rare_words_and_short_documents() -> None:
    index = Bm25(
        ["red cotton shirt", "red wool shirt with many many words about other things", "blue cotton socks", "red socks"]
    )
    assert index.search("wool") == [1] and index.search("cotton shirt")[0] == 0
    assert index.search("sock") == [3, 2] and index.search("the of and") == [] and index.search("zebra") == []


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("dark red", "red", 100),
        ("red", "blue", 29),
        ("noise cancelling", "noise canceling", 97),
        ("", "red", 0),
        ("6 ft", "10 ft", 67),
    ],
)
def test_token_set_ratio(a: str, b: str, expected: int) -> None:
    assert token_set_ratio(a, b) == expected == token_set_ratio(b, a)


@settings(max_examples=100, deadline=None)
@given(a=st.text("abc ", max_size=12), b=st.text("abc ", max_size=12))
def test_ratio_is_twice_the_longest_common_subsequence(a: str, b: str) -> None:
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    assert ratio(a, b) == (round(200 * table[-1][-1] / (len(a) + len(b))) if a or b else 100)


def test_reward_by_hand() -> None:
    assert purchase_reward(MUG, GOAL, {"color": "red"}) == 1.0
    assert purchase_reward(MUG, GOAL, {}) == pytest.approx(3 / 4)
    dear = Product(**{**vars(MUG), "price": 99.0})
    assert purchase_reward(dear, GOAL, {"color": "red"}) == pytest.approx(3 / 4)
    other = Product(
        "B", "Brisk Lamp and Shade for Rooms, Desks, Walls", 5.0, "Garden › Lamps", "lamps", attributes=("ceramic",)
    )
    assert type_score(other, GOAL) == 1.0  # one of three nouns in common: above 0.2, so the kinds count as equal
    assert nouns("Two-Pack Large Red Mugs, 12 oz Ceramic") == {"two", "mug", "ceramic"}
    wide = Goal(**{**vars(GOAL), "title": "Mug alpha beta gamma delta epsilon zeta eta theta iota kappa"})
    assert type_score(MUG, Goal(**{**vars(wide), "query": "x", "category": "y"})) == 0.1
    assert (
        type_score(
            MUG, Goal(**{**vars(wide), "title": "Mug alpha beta gamma delta epsilon", "query": "x", "category": "y"})
        )
        == 0.5
    )
    assert type_score(MUG, Goal(**{**vars(GOAL), "title": "Wool Socks"})) == 0.0


def test_every_own_goal_can_be_met() -> None:
    products, goals = make_catalog(60, 2)
    by_asin = {p.asin: p for p in products}
    assert len(goals) == 120 and all(purchase_reward(by_asin[g.asin], g, g.options) == 1.0 for g in goals)


def test_a_purchase_through_the_pages() -> None:
    world = WebShop()
    text = world.reset(3)
    assert text.startswith("WebShop [SEP] Instruction: [SEP] Find me") and "search[<your query>]" in text
    assert not world.step("click[buy now]").info["action_is_valid"]
    assert world.parse_action(" Search[Red Mug] ") == "search[red mug]" and world.parse_action("buy it") is None
    result = world.step(f"search[{world.goal.query}]")
    assert "Page 1 (Total results: 20)" in result.text and "click[next >]" in result.text
    assert (
        "Page 2" in world.step("click[next >]").text
        and "click[next >]" not in world.render()
        and "Page 1" in world.step("click[< prev]").text
    )
    for _ in range(2):
        if world.goal.asin.lower() in world.clickables():
            break
        world.step("click[next >]")
    assert (
        f"Price: ${world.products[world.goal.asin.lower()].price:.2f}" in world.step(f"click[{world.goal.asin}]").text
    )
    assert "Features" not in world.step("click[features]").text and "Buy Now" in world.step("click[< prev]").text
    for value in world.goal.options.values():
        assert f": {value}" in world.step(f"click[{value}]").text
    done = world.step("click[buy now]")
    assert (
        done.reward == 1.0
        and done.done
        and done.info["success"]
        and done.info["success_purchase"]
        and done.info["success_find"]
    )


def test_an_empty_result_page_and_a_wrong_purchase() -> None:
    world = WebShop()
    world.reset(0)
    result = world.step("search[zzzz]")
    assert result.info["end_of_page"] and world.clickables() == ["back to search"]
    world.step("click[back to search]")
    wrong = next(p for p in world.products.values() if p.query != world.goal.query)
    world.step(f"search[{wrong.title}]")
    world.step(f"click[{wrong.asin}]")
    bought = world.step("click[buy now]")
    assert bought.reward < 1 and bought.done and bought.info["success_purchase"] and not bought.info["success_find"]


def test_splits_do_not_meet() -> None:
    for goals in (600, 12_000):
        parts = [set(split_range(name, goals)) for name in ("test", "val", "train")]
        assert sum(map(len, parts)) == goals and not parts[0] & parts[1] and not parts[1] & parts[2]
    assert len(split_range("test", 12_000)) == 500 and split_range("val", 12_000) == range(500, 1500)
    assert WebShop(split="val").reset(1) != WebShop(split="train").reset(1)


def test_the_public_products_and_instructions() -> None:
    root = os.environ.get("TERRELLA_SHARED_DATA")
    if not root:
        pytest.skip("set TERRELLA_SHARED_DATA to the folder that holds spa/ to read the public product file")
    products_file, goals_file = (
        Path(root) / "spa/webshop_100_products.jsonl",
        Path(root) / "spa/webshop_items_ins_v2_1000.json",
    )
    products = load_products(products_file)
    goals = load_goals(goals_file, products)
    assert len(products) == 100 and len(goals) == 44
    by_asin = {p.asin: p for p in products}
    full = [purchase_reward(by_asin[g.asin], g, g.options) for g in goals]
    assert sum(r == 1.0 for r in full) >= 42, full  # the goal's own product, options chosen, meets it
    world = WebShop(products_file=str(products_file), goals_file=str(goals_file))
    found, rng = 0, random.Random(0)
    for goal in goals:
        hits = [world.asins[n] for n in world.index.search(goal.title)]
        found += goal.asin.lower() in hits[:10]
    assert found == 44
    others = [purchase_reward(rng.choice(products), g, {}) for g in goals]
    assert sum(others) / len(others) < 0.5 < sum(full) / len(full)
