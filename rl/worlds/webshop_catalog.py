"""Products and goals of WebShop: read from the public release's files, or made here."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from .base import WorldFault

FILES = {  # of the public release: products, then attributes with made instructions
    "small": ("items_shuffle_1000.json", "items_ins_v2_1000.json"),
    "full": ("items_shuffle.json", "items_ins_v2.json"),
}
HUMAN_FILE = "items_human_ins.json"
NO_PRICE, NO_CAP = 100.0, 1_000_000.0  # where a product names no price, and where no round sum is above it
CAPS = tuple(10.0 * n for n in range(1, 100))


@dataclass(frozen=True)
class Product:
    """One product. `price` lies between the two of `price_text` where that names a range."""

    asin: str
    title: str
    price: float
    category: str  # levels joined by ›
    query: str
    description: str = ""
    bullets: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    price_text: str = ""

    @property
    def document(self) -> str:
        """What of it is searched."""
        offered = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join((self.title, self.description, *self.bullets[:1], offered))


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
    options: tuple[str, ...]  # values alone


def needed_files(folder: str | Path, dataset: str, human: bool) -> tuple[Path, Path, Path | None]:
    """Files of products, of attributes and of people's instructions, each refused by name where it is missing."""
    paths = [Path(folder) / name for name in (*FILES[dataset], *([HUMAN_FILE] if human else []))]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        other = next(name for name in FILES if name != dataset)
        hint = f" (there is {FILES[other][0]}: dataset: {other})" if (Path(folder) / FILES[other][0]).is_file() else ""
        raise ValueError(
            f"folder: {folder} has no {' and no '.join(missing)}, which WebShop's public data holds for "
            f"dataset: {dataset}{' and goals: human' if human else ''}{hint}"
        )
    return paths[0], paths[1], paths[2] if human else None


def _json(path: Path, kind: type) -> Any:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WorldFault(f"webshop: {path} is no JSON: {error}") from None
    if not isinstance(read, kind):
        raise WorldFault(f"webshop: {path} holds a {type(read).__name__}, not the {kind.__name__} of the public file")
    return read


def _prices(row: dict[str, Any]) -> list[float]:
    """One price or two out of `$5.99$9.99`."""
    found = [float(re.sub(r"[^\d.]", "", part)) for part in str(row.get("pricing") or "").split("$")[1:]]
    return found[:2] or [NO_PRICE]


def _product(row: dict[str, Any], attributes: dict[str, Any]) -> Product:
    options = {
        name.lower(): tuple(str(value["value"]).strip().replace("/", " | ").lower() for value in values)
        for name, values in (row.get("customization_options") or {}).items()
        if values
    }
    prices, bullets = _prices(row), row["small_description"]
    return Product(
        row["asin"],
        row["name"],
        # Anywhere between the two, as in the release, but the same at every start.
        random.Random(row["asin"]).uniform(*prices) if len(prices) == 2 else prices[0],
        row["product_category"],
        row["query"].lower().strip(),
        row["full_description"] or "",
        tuple(bullets) if isinstance(bullets, list) else (str(bullets or ""),),
        tuple(attributes.get(row["asin"], {}).get("attributes", ("DUMMY_ATTR",))),
        options,
        " to ".join(f"${price}" for price in prices),
    )


def load_products(path: Path, attributes: dict[str, Any], limit: int | None = None) -> list[Product]:
    """Products of the public file, the first of each id, at most `limit` rows of it."""
    products: dict[str, Product] = {}
    for number, row in enumerate(_json(path, list)[:limit]):
        try:
            if row["asin"] != "nan" and len(row["asin"]) <= 10 and row["asin"] not in products:
                products[row["asin"]] = _product(row, attributes)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WorldFault(f"webshop: {path}: product {number}: {type(error).__name__}: {error}") from None
    if not products:
        raise WorldFault(f"webshop: {path} holds no products")
    return list(products.values())


def _cap(price: float, rng: random.Random) -> tuple[float, str]:
    """A price limit among the next round sums above the price, and how an instruction ends with it."""
    above = [cap for cap in CAPS if cap > price][:4]
    if len(above) < 2:
        return NO_CAP, ""
    cap = max(rng.sample(above, 2))
    return cap, f", and price lower than {cap:.2f} dollars"


def _goal(product: Product, text: str, attributes: Sequence[str], options: Sequence[str], cap: float) -> Goal:
    known = (product.asin, text, product.title, product.category, product.query)
    return Goal(*known, cap, tuple(attributes), tuple(options))


def _made_goals(product: Product, row: dict[str, Any], rng: random.Random) -> Iterator[Goal]:
    """Goals of the instruction that was made for a product: one for each way to choose its options."""
    if row.get("instruction") is None:
        return
    cap, said = _cap(product.price, rng)
    names = sorted(product.options)
    for chosen in itertools.product(*(product.options[name] for name in names)):
        wish = ", and ".join(f"{name}: {value}" for name, value in zip(names, chosen, strict=True))
        text = f"{row['instruction']}{' with ' if wish else ''}{wish}{said}"
        yield _goal(product, text, row["instruction_attributes"], chosen, cap)


def _human_goals(product: Product, rows: list[dict[str, Any]], rng: random.Random) -> Iterator[Goal]:
    """Goals that people wrote for a product; those that name no attribute are left out."""
    for row in rows:
        if row["instruction_attributes"]:
            cap, said = _cap(product.price, rng)
            options = row["instruction_options"]
            chosen = list(options.values()) if isinstance(options, dict) else options
            yield _goal(product, row["instruction"].strip(".") + said, row["instruction_attributes"], chosen, cap)


def load_shop(
    folder: str | Path, dataset: str, human: bool, limit: int | None = None
) -> tuple[list[Product], list[Goal]]:
    """Products and goals of a folder of the public files, the goals in the release's order."""
    products_file, attributes_file, human_file = needed_files(folder, dataset, human)
    attributes = _json(attributes_file, dict)
    products = load_products(products_file, attributes, limit)
    source, rows = (human_file, _json(human_file, dict)) if human_file else (attributes_file, attributes)
    goals: list[Goal] = []
    for product in products:
        caps = random.Random(f"{product.asin} caps")  # of its own, so that a cap does not depend on the other products
        try:
            if human:
                goals += _human_goals(product, rows.get(product.asin, []), caps)
            else:
                goals += _made_goals(product, rows.get(product.asin, {}), caps)
        except (KeyError, TypeError, AttributeError) as error:
            raise WorldFault(f"webshop: {source}: {product.asin}: {type(error).__name__}: {error}") from None
    if not goals:
        raise WorldFault(f"webshop: {source} has no instruction for any of the {len(products)} products")
    random.Random(233).shuffle(goals)
    return products, goals


@cache
def _made_of() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_name("webshop.yaml").read_text(encoding="utf-8"))


def make_goal(product: Product, lead: str, attributes: tuple[str, ...], rng: random.Random) -> Goal:
    """A goal for one product: an opening phrase, one value of each option, and a price cap above its price."""
    options = {name: rng.choice(values) for name, values in product.options.items()}
    sums = (10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 80.0, 100.0, 150.0, 200.0)
    cap = next((cap for cap in sums if cap > product.price), product.price) + rng.choice((0.0, 10.0))
    said = "".join(f", with {name}: {value}" for name, value in options.items())
    return _goal(
        product, f"{lead}{said}, and price lower than {cap:.2f} dollars", attributes, tuple(options.values()), cap
    )


def make_catalog(products: int, goals_per_product: int = 3) -> tuple[list[Product], list[Goal]]:
    """Products and goals of our own, every goal fully met by the product it was made for."""
    parts, rng = _made_of(), random.Random(0)
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
        shelf.append(
            Product(
                f"T{number:09d}",
                title,
                price,
                kind["category"],
                query,
                text,
                bullets,
                chosen,
                options,
                f"${price:.2f}",
            )
        )
        for _ in range(goals_per_product):
            wanted = tuple(rng.sample(chosen, rng.randint(1, len(chosen))))
            goals.append(make_goal(shelf[-1], f"Find me {query} that are {', '.join(wanted)}", wanted, rng))
    rng.shuffle(goals)
    return shelf, goals
