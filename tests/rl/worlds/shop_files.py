"""WebShop's public files, written small: products of our own in the layout of items_shuffle, items_ins_v2 and
items_human_ins.
"""

import json
from pathlib import Path

from terrella.rl.worlds.webshop_catalog import FILES, HUMAN_FILE, Product, make_catalog


def item(product: Product) -> dict:
    """A row of items_shuffle."""
    return {
        "name": product.title,
        "full_description": product.description,
        "pricing": f"${product.price:.2f}",
        "images": ["https://example.org/a.jpg"],
        "product_category": product.category,
        "average_rating": "",
        "small_description": list(product.bullets),
        "customization_options": {
            name.title(): [{"value": value.upper(), "image": None} for value in values]
            for name, values in product.options.items()
        }
        or "",
        "asin": product.asin,
        "category": "home",
        "query": product.query.title(),
        "page": 1,
    }


def write(folder: Path, products: int = 40, dataset: str = "small", human: bool = True) -> list[Product]:
    """Write the files; every second product has a made instruction, every fourth two by people, one of them without
    attributes.
    """
    shelf, _ = make_catalog(products)
    instructions, written = {}, {}
    for number, product in enumerate(shelf):
        instructions[product.asin] = {"attributes": list(product.attributes)}
        if number % 2 == 0:
            said = {"instruction": f"Find me {product.query}", "instruction_attributes": [product.attributes[0]]}
            instructions[product.asin] |= said
        if number % 4 == 0:
            chosen = [values[0] for values in product.options.values()]
            row = {"asin": product.asin, "instruction": f"i want {product.query}, {chosen[0]}.", "worker_id": "x"}
            asked = {"instruction_attributes": list(product.attributes[:1]), "instruction_options": chosen}
            written[product.asin] = [
                {**row, **asked},
                {**row, "instruction_attributes": [], "instruction_options": []},
            ]
    folder.mkdir(parents=True, exist_ok=True)
    rows = [item(product) for product in shelf]
    rows += [item(shelf[0]) | {"name": "the same id again"}, item(shelf[0]) | {"asin": "nan"}]
    texts = {FILES[dataset][0]: rows, FILES[dataset][1]: instructions} | ({HUMAN_FILE: written} if human else {})
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return shelf
