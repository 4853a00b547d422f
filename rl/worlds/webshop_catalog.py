"""Products and goals of WebShop: read from the public document format, or made here."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

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


_BRANDS = ("Alder", "Brisk", "Corvid", "Dovetail", "Ember", "Fjordline", "Gable", "Harrow", "Ivo", "Juniper")
_COLORS = ("black", "white", "navy", "forest green", "rose", "sand")
# (category levels, search phrase, noun of the title, attributes, sizes, lowest price)
_KINDS = (
    (
        "Home & Kitchen › Dining › Drinkware › Mugs",
        "coffee mugs",
        "Mug",
        ("dishwasher safe", "double wall", "ceramic", "stackable"),
        ("8 oz", "12 oz"),
        8,
    ),
    (
        "Home & Kitchen › Furniture › Tables › Side Tables",
        "side tables",
        "Side Table",
        ("solid wood", "easy assembly", "space saving"),
        (),
        45,
    ),
    (
        "Home & Kitchen › Bedding › Blankets",
        "throw blankets",
        "Throw Blanket",
        ("machine washable", "super soft", "fleece"),
        ("twin", "queen"),
        18,
    ),
    (
        "Clothing › Women › Shoes › Pumps",
        "women's pumps",
        "Heel Pumps",
        ("rubber sole", "closed toe", "arch support"),
        ("6", "7", "8", "9"),
        30,
    ),
    (
        "Clothing › Men › Shirts › Polos",
        "men's polos",
        "Polo Shirt",
        ("moisture wicking", "slim fit", "cotton"),
        ("small", "medium", "large"),
        16,
    ),
    (
        "Electronics › Audio › Headphones › Over-Ear",
        "headphones",
        "Headphones",
        ("noise cancelling", "wireless", "long battery life"),
        (),
        35,
    ),
    (
        "Electronics › Accessories › Cables",
        "usb cables",
        "USB Cable",
        ("fast charging", "braided", "gold plated"),
        ("3 ft", "6 ft", "10 ft"),
        6,
    ),
    (
        "Beauty › Hair Care › Shampoo",
        "shampoo",
        "Shampoo",
        ("sulfate free", "tea tree", "cruelty free", "paraben free"),
        ("250 ml", "500 ml"),
        9,
    ),
    (
        "Beauty › Skin Care › Moisturizers",
        "moisturizers",
        "Face Cream",
        ("fragrance free", "hyaluronic acid", "dry skin"),
        ("30 ml", "50 ml"),
        12,
    ),
    (
        "Grocery › Snacks › Nuts",
        "mixed nuts",
        "Roasted Nuts",
        ("gluten free", "low sodium", "non gmo"),
        ("8 ounce", "16 ounce"),
        7,
    ),
)


def make_catalog(products: int = 200, goals_per_product: int = 3, seed: int = 0) -> tuple[list[Product], list[Goal]]:
    """Products and goals of our own, every goal fully met by the product it was made for."""
    rng = random.Random(seed)
    shelf, goals = [], []
    for number in range(products):
        category, query, noun, attributes, sizes, lowest = _KINDS[number % len(_KINDS)]
        chosen = tuple(rng.sample(attributes, rng.randint(2, len(attributes))))
        colors = tuple(rng.sample(_COLORS, rng.randint(2, 4)))
        options = {"color": colors, **({"size": sizes} if sizes else {})}
        title = f"{rng.choice(_BRANDS)} {noun}, {', '.join(a.title() for a in chosen[:2])}"
        text = f"A {noun.lower()} made with care: {' and '.join(chosen)}."
        price = round(lowest * rng.uniform(1, 2.5), 2)
        bullets = tuple(f"{a.capitalize()}." for a in chosen)
        shelf.append(Product(f"T{number:09d}", title, price, category, query, text, bullets, chosen, options))
        for _ in range(goals_per_product):
            wanted = tuple(rng.sample(chosen, rng.randint(1, len(chosen))))
            goals.append(make_goal(shelf[-1], f"Find me {query} that are {', '.join(wanted)}", wanted, rng))
    rng.shuffle(goals)
    return shelf, goals
