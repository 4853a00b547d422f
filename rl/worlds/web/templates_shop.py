"""Task templates of the shop and of the place finder, and those that need both."""

from __future__ import annotations

import random
from collections.abc import Iterator

from .sites.base import Site, money
from .sites.places import SPEEDS, distance, minutes
from .sites.words import GOODS, KINDS, STREETS
from .templates import Check, Instance, Step, template, text_at, value_at

Sites = dict[str, Site]
FIND = "Search the shop"
PLACE = "Find a place"


def _products(sites: Sites) -> list[tuple[int, str, str, int, float, int]]:
    return sites["shopping"].rows("SELECT id, name, category, price, rating, stock FROM products ORDER BY id")


def _to(name: str) -> list[Step]:
    return [("search", FIND, name), ("click", name)]


@template(101, "shopping", "What is the price of the {{product}}?")
def price(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for _, name, _, cents, *_ in _products(sites):
        steps: list[Step] = [*_to(name), ("exit", money(cents))]
        yield Instance({"product": name}, Check().says(must_include=[money(cents).lstrip("$")]).done, steps)


@template(102, "shopping", "Which product in the category {{category}} is the cheapest?")
def cheapest(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for category in GOODS:
        name = sites["shopping"].one("SELECT name FROM products WHERE category=? ORDER BY price", category)[0]
        steps: list[Step] = [
            ("click", category.title()),
            ("select", "Sort by", "Price"),
            ("click", "Sort"),
            ("exit", name),
        ]
        yield Instance({"category": category}, Check().says(exact_match=name).done, steps)


@template(103, "shopping", "Open the page of the {{product}}.")
def show(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for number, name, *_ in _products(sites):
        yield Instance(
            {"product": name}, Check().at(f"__SHOPPING__/product/{number}", "EXACT").done, [*_to(name), ("exit", "")]
        )


@template(104, "shopping", "Put {{quantity}} of the {{product}} into the cart.")
def cart(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for _, name, _, cents, *_ in _products(sites):
        quantity = str(coin.randint(1, 5))
        check = Check().page("__SHOPPING__/cart", text_at("#cart"), must_include=[name, f"{quantity} x {money(cents)}"])
        steps: list[Step] = [*_to(name), ("select", "Quantity", quantity), ("click", "Add to cart"), ("exit", "")]
        yield Instance({"quantity": quantity, "product": name}, check.done, steps)


@template(105, "shopping", "Add the {{product}} to my wish list.")
def wish(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for _, name, *_ in _products(sites):
        check = Check().page("__SHOPPING__/wishlist", text_at("#wishes"), must_include=[name])
        yield Instance({"product": name}, check.done, [*_to(name), ("click", "Add to wish list"), ("exit", "")])


@template(106, "shopping", "Order one {{product}}.")
def order(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for _, name, _, cents, *_ in _products(sites):
        check = Check().page(
            "func:shopping_get_latest_order_url()",
            text_at("#order"),
            must_include=[name, f"1 x {money(cents)}", "pending"],
        )
        steps: list[Step] = [*_to(name), ("click", "Add to cart"), ("click", "Place order"), ("exit", "")]
        yield Instance({"product": name}, check.done, steps)


@template(107, "shopping", "How many of the {{product}} are in stock? Answer with the number.")
def stock(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for _, name, _, _, _, count in _products(sites):
        yield Instance({"product": name}, Check().says(exact_match=str(count)).done, [*_to(name), ("exit", str(count))])


@template(108, "shopping", "Change the street of my address to {{street}}.")
def street(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for name in STREETS:
        address = f"{coin.randint(1, 99)} {name}"
        check = Check().page("__SHOPPING__/account", value_at('[name="street"]'), exact_match=address)
        yield Instance(
            {"street": address},
            check.done,
            [("click", "Account"), ("type", "Street", address), ("click", "Save address"), ("exit", "")],
        )


@template(109, "shopping", "What does the {{product}} cost? Answer N/A if the shop does not have it.")
def absent(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    names = {row[1] for row in _products(sites)}
    for maker in ("Gneiss", "Holm", "Inlet"):
        for goods in GOODS.values():
            name = f"{maker} pink {coin.choice(goods)}"
            if name not in names:
                yield Instance(
                    {"product": name}, Check().says(fuzzy_match="N/A").done, [("search", FIND, name), ("exit", "N/A")]
                )


@template(110, "shopping", "What was the total of my order {{order}}?")
def total(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for number, cents in sites["shopping"].rows("SELECT number, SUM(quantity*price) FROM items GROUP BY number"):
        steps: list[Step] = [("click", "Orders"), ("click", f"Order {number}"), ("exit", money(cents))]
        yield Instance({"order": str(number)}, Check().says(must_include=[money(cents).lstrip("$")]).done, steps)


@template(111, "shopping", 'Review the {{product}} with {{stars}} stars and the text "{{text}}".')
def review(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for number, name, *_ in _products(sites):
        stars, text = (
            str(coin.randint(1, 5)),
            coin.choice(("As described", "A fine gift", "Too small for me", "Would buy again")),
        )
        check = Check().page(
            f"__SHOPPING__/product/{number}", text_at("#reviews"), must_include=[f"sam: {stars} stars. {text}"]
        )
        steps: list[Step] = [
            *_to(name),
            ("select", "Stars", f"{stars} stars"),
            ("type", "Your review", text),
            ("click", "Send review"),
            ("exit", ""),
        ]
        yield Instance({"product": name, "stars": stars, "text": text}, check.done, steps)


@template(112, "shopping", "Show the best rated product of the category {{category}}.")
def best(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for category in GOODS:
        row = sites["shopping"].one(
            "SELECT id, name FROM products WHERE category=? ORDER BY rating DESC, name", category
        )
        steps: list[Step] = [
            ("click", category.title()),
            ("select", "Sort by", "Rating"),
            ("click", "Sort"),
            ("click", row[1]),
            ("exit", ""),
        ]
        yield Instance({"category": category}, Check().at(f"__SHOPPING__/product/{row[0]}", "EXACT").done, steps)


def _places(sites: Sites) -> list[tuple[int, str, str, str, str, str, str, int, int]]:
    return sites["map"].rows("SELECT id, name, kind, city, address, phone, hours, x, y FROM places ORDER BY id")


def _visit(name: str) -> list[Step]:
    return [("search", PLACE, name), ("click", name)]


@template(501, "map", "What is the phone number of {{place}}?")
def phone(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for row in _places(sites):
        yield Instance({"place": row[1]}, Check().says(must_include=[row[5]]).done, [*_visit(row[1]), ("exit", row[5])])


@template(502, "map", "What is the address of {{place}}?")
def address(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for row in _places(sites):
        check = Check().says(must_include=[row[4], row[3]])
        yield Instance({"place": row[1]}, check.done, [*_visit(row[1]), ("exit", f"{row[4]}, {row[3]}")])


@template(503, "map", "Which {{kind}} is nearest to {{place}}?")
def nearest(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    rows = _places(sites)
    for row in rows:
        for kind in coin.sample(sorted(KINDS), 2):
            near = sorted(
                (distance((row[7], row[8]), (r[7], r[8])), r[1]) for r in rows if r[2] == kind and r[1] != row[1]
            )
            if near[0][0] == near[1][0]:
                continue  # two are equally near
            steps: list[Step] = [
                ("click", "Nearby"),
                ("type", "Name of a place", row[1]),
                ("select", "Kind", kind),
                ("click", "Show"),
                ("exit", near[0][1]),
            ]
            yield Instance({"kind": kind, "place": row[1]}, Check().says(exact_match=near[0][1]).done, steps)


def _pairs(sites: Sites, coin: random.Random) -> Iterator[tuple[str, str, str, int]]:
    rows = _places(sites)
    for row in rows:
        other = coin.choice([r for r in rows if r[0] != row[0]])
        yield row[1], other[1], coin.choice(sorted(SPEEDS)), distance((row[7], row[8]), (other[7], other[8]))


def _route(a: str, b: str, by: str) -> list[Step]:
    return [
        ("click", "Directions"),
        ("type", "From", a),
        ("type", "To", b),
        ("select", "By", by),
        ("click", "Show route"),
    ]


@template(504, "map", "Show the way from {{from}} to {{to}} by {{by}}.")
def route(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for a, b, by, _ in _pairs(sites, coin):
        check = (
            Check()
            .page("last", value_at('[name="route_from"]'), exact_match=a)
            .page("last", value_at('[name="route_to"]'), exact_match=b)
        )
        check.page("last", value_at('[name="by"]'), exact_match=by).page(
            "last", text_at("#route"), must_include=["Distance"]
        )
        yield Instance({"from": a, "to": b, "by": by}, check.done, [*_route(a, b, by), ("exit", "")])


@template(505, "map", "How many minutes does it take from {{from}} to {{to}} by {{by}}? Answer with the number.")
def travel(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for a, b, by, tenths in _pairs(sites, coin):
        answer = str(minutes(tenths, by))
        yield Instance(
            {"from": a, "to": b, "by": by}, Check().says(exact_match=answer).done, [*_route(a, b, by), ("exit", answer)]
        )


@template(506, "map", "Save {{place}} to my places.")
def save(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for row in _places(sites):
        check = Check().page("__MAP__/saved", text_at("#saved"), must_include=[row[1]])
        yield Instance({"place": row[1]}, check.done, [*_visit(row[1]), ("click", "Save place"), ("exit", "")])


@template(507, "map", "Open the page of {{place}}.")
def visit(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for row in _places(sites):
        yield Instance(
            {"place": row[1]}, Check().at(f"__MAP__/place/{row[0]}", "EXACT").done, [*_visit(row[1]), ("exit", "")]
        )


@template(508, "map", "Show the route from {{from}} to {{to}} by car and tell me the distance.")
def far(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for a, b, _, tenths in _pairs(sites, coin):
        answer = f"{tenths // 10}.{tenths % 10}"
        query = f"__MAP__/directions?route_from={a.replace(' ', '+')}&route_to={b.replace(' ', '+')}&by=car"
        check = Check().says(must_include=[answer]).at(query)
        yield Instance({"from": a, "to": b}, check.done, [*_route(a, b, "car"), ("exit", f"{answer} km")])


@template(
    601, "map shopping", "Set the phone number of my shop account to that of {{place}}.", "__MAP__ |AND| __SHOPPING__"
)
def copy_phone(sites: Sites, coin: random.Random) -> Iterator[Instance]:
    for row in _places(sites):
        check = Check().page("__SHOPPING__/account", value_at('[name="phone"]'), exact_match=row[5])
        steps: list[Step] = [
            *_visit(row[1]),
            ("tab", "1"),
            ("click", "Account"),
            ("type", "Phone", row[5]),
            ("click", "Save address"),
            ("exit", ""),
        ]
        yield Instance({"place": row[1]}, check.done, steps)
