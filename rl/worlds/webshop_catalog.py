"""Products and goals of WebShop: read from the public document format, or made here."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ...core.files import json_lines
from .base import WorldFault


@dataclass(frozen=True)
class Product:
    """One product. `price` is the lowest where a range is given."""

    asin: str
    title: str
    price: float
    category: str  # levels joined by ›
    query: str
    description: str = ""
    bullets: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Goal:
    """What the shopper is asked to buy, and what the reward compares with."""

    asin: str
    instruction: str
    title: str
    category: str
    query: str
    price_cap: float
    attributes: tuple[str, ...]
    options: dict[str, str]


def load_products(path: str | Path) -> list[Product]:
    """Read JSON lines of {id, contents, product}, the document format of the public search index."""
    products = []
    for number, line in json_lines(Path(path).read_text(encoding="utf-8")):
        try:
            row = json.loads(line)["product"]
            options = {
                name.lower(): tuple(str(v).lower() for v in values)
                for name, values in (row.get("options") or {}).items()
                if values
            }
            products.append(
                Product(
                    row["asin"],
                    row["Title"],
                    float(min(row.get("pricing") or [100.0])),
                    row.get("product_category") or "",
                    row.get("query") or "",
                    row.get("Description") or "",
                    tuple(row.get("BulletPoints") or ()),
                    tuple(row.get("Attributes") or ()),
                    options,
                )
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WorldFault(f"webshop: {path}:{number}: {type(error).__name__}: {error}") from None
    return products


def _price_cap(price: float, rng: random.Random) -> float:
    return next(
        (cap for cap in (10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 80.0, 100.0, 150.0, 200.0) if cap > price), price
    ) + rng.choice((0.0, 10.0))


def make_goal(product: Product, lead: str, attributes: tuple[str, ...], rng: random.Random) -> Goal:
    """A goal for one product: an opening phrase, one value of each option, and a price cap above its price."""
    options = {name: rng.choice(values) for name, values in product.options.items()}
    cap = _price_cap(product.price, rng)
    said = "".join(f", with {name}: {value}" for name, value in options.items())
    instruction = f"{lead}{said}, and price lower than {cap:.2f} dollars"
    return Goal(product.asin, instruction, product.title, product.category, product.query, cap, attributes, options)


def load_goals(path: str | Path, products: list[Product], seed: int = 233) -> list[Goal]:
    """Goals of the public instruction file (asin -> instruction, instruction_attributes) for the products at hand,
    in shuffled order.
    """
    rows = json.loads(Path(path).read_text(encoding="utf-8"))
    rng = random.Random(seed)
    goals = []
    for product in products:
        row = rows.get(product.asin, {})
        if row.get("instruction"):
            goals.append(make_goal(product, row["instruction"].rstrip(". "), tuple(row["instruction_attributes"]), rng))
    if not goals:
        raise WorldFault(f"webshop: {path} has no instruction for any of the {len(products)} products")
    rng.shuffle(goals)
    return goals


@cache
def _made_of() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_name("webshop.yaml").read_text(encoding="utf-8"))


def make_catalog(products: int = 200, goals_per_product: int = 3, seed: int = 0) -> tuple[list[Product], list[Goal]]:
    """Products and goals of our own, every goal fully met by the product it was made for."""
    parts, rng = _made_of(), random.Random(seed)
    shelf, goals = [], []
    for number in range(products):
        kind = parts["kinds"][number % len(parts["kinds"])]
        query, noun = kind["query"], kind["noun"]
        chosen = tuple(rng.sample(kind["attributes"], rng.randint(2, len(kind["attributes"]))))
        options = {"color": tuple(rng.sample(parts["colors"], rng.randint(2, 4)))}
        if kind["sizes"]:
            options["size"] = tuple(kind["sizes"])
        title = f"{rng.choice(parts['brands'])} {noun}, {', '.join(a.title() for a in chosen[:2])}"
        text = f"A {noun.lower()} made with care: {' and '.join(chosen)}."
        price = round(kind["lowest_price"] * rng.uniform(1, 2.5), 2)
        bullets = tuple(f"{a.capitalize()}." for a in chosen)
        shelf.append(Product(f"T{number:09d}", title, price, kind["category"], query, text, bullets, chosen, options))
        for _ in range(goals_per_product):
            wanted = tuple(rng.sample(chosen, rng.randint(1, len(chosen))))
            goals.append(make_goal(shelf[-1], f"Find me {query} that are {', '.join(wanted)}", wanted, rng))
    rng.shuffle(goals)
    return shelf, goals
