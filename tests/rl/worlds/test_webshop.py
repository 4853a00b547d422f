"""WebShop: search, pages, the reward by hand, goals of our own and of the public files."""

import json
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrella.core.errors import ConfigError
from terrella.rl.worlds.base import WorldFault
from terrella.rl.worlds.tasks import named_tasks
from terrella.rl.worlds.webshop import WebShop, split_range
from terrella.rl.worlds.webshop_catalog import HUMAN_FILE, Goal, Product, load_shop, make_catalog
from terrella.rl.worlds.webshop_score import nouns, plain_colour, purchase_reward, ratio, token_set_ratio, type_score
from terrella.rl.worlds.webshop_search import Bm25, stem, stored_length, terms
from terrella.tests.rl.worlds import shop_files

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
    ("red",),
)


def test_bm25_prefers_rare_words_and_short_documents() -> None:
    texts = [
        "red cotton shirt",
        "red wool shirt with many many words about other things",
        "blue cotton socks",
        "red socks",
    ]
    index = Bm25(dict(zip("bacd", texts, strict=True)))
    assert index.search("wool") == ["a"] and index.search("cotton shirt")[0] == "b"
    assert index.search("sock") == ["d", "c"] and index.search("the of and") == [] and index.search("zebra") == []
    same = Bm25({"z": "one mug", "y": "one mug", "x": "two cups"})
    assert same.search("mugs") == ["y", "z"] and same.search("mugs", limit=1) == ["y"]  # equal scores: by id


def test_bm25_by_hand() -> None:
    """Two documents, one term in one of them: idf ln(1 + 1.5 / 1.5), norm 0.9 (0.6 + 0.4 * 2 / 1.5)."""
    index = Bm25({"a": "wool wool", "b": "mug"})
    assert index.norms[0] == pytest.approx(0.9 * (0.6 + 0.4 * 2 / 1.5))
    both = Bm25({"a": "wool " * 60, "b": "wool " * 62})  # of 60 and 62 the index keeps 60
    assert stored_length(60) == stored_length(62) == 60 and stored_length(39) == 39 and stored_length(41) == 40
    assert both.search("wool") == ["b", "a"]  # more often in what counts as equally long


def test_terms_are_those_of_an_english_index() -> None:
    said = "Women's running-shoes, size 8.5, description:solid wood; 1,000 u.s.a. plus_size it's ponies"
    assert terms(said) == ["women", "run", "shoe", "size", "8.5", "description:solid", "wood", "1,000", "u.s.a"] + [
        "plus_siz",
        "poni",
    ]
    pairs = "relational relat conditional condit hopping hop hoping hope falling fall adoption adopt agreed agre"
    pairs += " controlling control generalizations gener probably probabl archaeology archaeolog sky sky"
    words = pairs.split()
    assert [stem(word) for word in words[::2]] == words[1::2]


def test_an_option_counts_by_the_first_colour_it_holds() -> None:
    assert plain_colour("navy blue") == "blue" == plain_colour("blue heather") and plain_colour("xl") == "xl"
    wanted = Goal(**{**vars(GOAL), "options": ("navy blue",)})
    assert purchase_reward(MUG, wanted, {"color": "blue heather"}) == 1.0 > purchase_reward(MUG, wanted, {"c": "teal"})


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
    assert len(goals) == 120 and all(
        purchase_reward(by_asin[g.asin], g, dict(enumerate(g.options))) == 1.0 for g in goals
    )


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
    for value in world.goal.options:
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


def test_a_folder_of_the_public_files(tmp_path: Path) -> None:
    shelf = shop_files.write(tmp_path)
    products, goals = load_shop(tmp_path, "small", human=False)
    assert [p.asin for p in products] == [p.asin for p in shelf]  # one id twice and one that is no id are left out
    for read, made in zip(products, shelf, strict=True):
        assert (read.title, read.query, read.options, read.attributes) == (
            made.title,
            made.query,
            made.options,
            made.attributes,
        )
        assert read.price == made.price and read.price_text == f"${read.price}"
    ways = {p.asin: len(p.options["color"]) * len(p.options.get("size", "x")) for p in shelf[::2]}
    assert len(goals) == sum(ways.values()) and {g.asin for g in goals} == set(ways)
    by_asin = {p.asin: p for p in products}
    assert all(purchase_reward(by_asin[g.asin], g, dict(enumerate(g.options))) == 1.0 for g in goals)
    assert all(by_asin[g.asin].price < g.price_cap <= by_asin[g.asin].price + 40 for g in goals)
    sized = next(g for g in goals if len(g.options) == 2)
    assert (
        sized.instruction
        == f"Find me {sized.query} with color: {sized.options[0]}, and size: {sized.options[1]}"
        + (f", and price lower than {sized.price_cap:.2f} dollars")
    )
    again = load_shop(tmp_path, "small", human=False)
    assert again == (products, goals)
    assert len(load_shop(tmp_path, "small", human=False, limit=10)[0]) == 10
    human = load_shop(tmp_path, "small", human=True)[1]
    assert len(human) == 10 and all("i want" in g.instruction and "., and" not in g.instruction for g in human)
    world = WebShop(folder=str(tmp_path), goals="human", split="train")
    assert "i want" in world.reset(0) and f"Price: ${by_asin[world.goal.asin].price}" in _opened(world)


def _opened(world: WebShop) -> str:
    world.step(f"search[{world.products[world.goal.asin.lower()].title}]")
    return world.step(f"click[{world.goal.asin}]").text


def test_prices_of_the_public_files(tmp_path: Path) -> None:
    shop_files.write(tmp_path, 4)
    path = tmp_path / "items_shuffle_1000.json"
    rows = json.loads(path.read_text())[:4]
    for row, price in zip(rows, ("$1,099.50", "$5.99$9.99", "", "$2000"), strict=True):
        row["pricing"] = price
    path.write_text(json.dumps(rows))
    products, goals = load_shop(tmp_path, "small", human=False)
    assert [p.price_text for p in products] == ["$1099.5", "$5.99 to $9.99", "$100.0", "$2000.0"]
    assert (
        5.99 < products[1].price < 9.99 and products[1].price == load_shop(tmp_path, "small", human=False)[0][1].price
    )
    dear = next(g for g in goals if g.asin == products[0].asin)
    assert dear.price_cap == 1_000_000 and "dollars" not in dear.instruction  # no round sum up to 990 is above it


def test_the_folder_is_checked_by_name(tmp_path: Path) -> None:
    shop_files.write(tmp_path, 4, human=False)
    with pytest.raises(ConfigError, match=f"WebShop.folder: .* has no {HUMAN_FILE}, .* goals: human"):
        named_tasks(["WebShop"], config={"folder": str(tmp_path), "goals": "human"})
    with pytest.raises(ConfigError, match=r"no items_shuffle\.json and no items_ins_v2\.json.*dataset: small"):
        named_tasks(["WebShop"], config={"folder": str(tmp_path), "dataset": "full"})
    with pytest.raises(ConfigError, match="foldr"):
        named_tasks(["WebShop"], config={"foldr": str(tmp_path)})
    with pytest.raises(ValueError, match="folder: dataset and goals"):
        WebShop(dataset="full")
    tasks = named_tasks(["WebShop", "WebShopTest"], config={"folder": str(tmp_path)})
    assert [task.config["split"] for task in tasks.values()] == ["train", "test"]
    path = tmp_path / "items_shuffle_1000.json"
    rows = json.loads(path.read_text())
    del rows[2]["query"]
    path.write_text(json.dumps(rows))
    with pytest.raises(WorldFault, match=r"items_shuffle_1000\.json: product 2: KeyError: 'query'"):
        tasks["WebShop"].make()
    path.write_text("[")
    with pytest.raises(WorldFault, match=r"items_shuffle_1000\.json is no JSON"):
        tasks["WebShop"].make()
    path.write_text("{}")
    with pytest.raises(WorldFault, match="holds a dict, not the list"):
        tasks["WebShop"].make()


def test_the_public_products_and_instructions(tmp_path: Path) -> None:
    root = os.environ.get("TERRELLA_SHARED_DATA")
    if not root:
        pytest.skip("set TERRELLA_SHARED_DATA to the folder that holds spa/ to read the public products")
    lines = (Path(root) / "spa/webshop_100_products.jsonl").read_text(encoding="utf-8").splitlines()
    documents = [json.loads(line) for line in lines]
    rows = [d["product"] | {"pricing": "".join(f"${p}" for p in d["product"]["pricing"])} for d in documents]
    (tmp_path / "items_shuffle_1000.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "items_ins_v2_1000.json").write_text((Path(root) / "spa/webshop_items_ins_v2_1000.json").read_text())
    products, goals = load_shop(tmp_path, "small", human=False)
    assert len(products) == 100 and len({g.asin for g in goals}) == 44
    # What is indexed and what pages show is what the release made of the same rows.
    assert [p.document.lower() for p in products] == [d["contents"] for d in documents]
    shown = ("options", "Price", "Attributes", "BulletPoints", "query")
    for read, d in zip(products, documents, strict=True):
        options = {name: list(values) for name, values in read.options.items()}
        told = (options, read.price_text, list(read.attributes), list(read.bullets), read.query)
        assert told == tuple(d["product"][key] for key in shown), read.asin
    by_asin = {p.asin: p for p in products}
    full = [purchase_reward(by_asin[g.asin], g, dict(enumerate(g.options))) for g in goals]
    met = {g.asin for g, reward in zip(goals, full, strict=True) if reward == 1.0}
    assert len(met) >= 42, full  # the goal's own product, options chosen, meets it
    world = WebShop(folder=str(tmp_path))
    wanted = {g.asin: g for g in goals}.values()
    assert all(goal.asin.lower() in world.index.search(goal.title, 10) for goal in wanted)
    rng = random.Random(0)
    others = [purchase_reward(rng.choice(products), g, {}) for g in wanted]
    assert sum(others) / len(others) < 0.5 < sum(full) / len(full)
