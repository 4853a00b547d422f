"""WebShop: search a shop, read pages, choose options and buy. Pages are text; there is no server and no Java."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .base import Action, Snapshot, StepResult, World, WorldFault, check_mode, check_started
from .webshop_catalog import Goal, Product, load_shop, make_catalog, needed_files
from .webshop_score import purchase_reward
from .webshop_search import Bm25

PER_PAGE, HITS = 10, 50
MADE = 200  # products of our own
SEPARATOR = " [SEP] "
BACK, NEXT, PREVIOUS, BUY = "back to search", "next >", "< prev", "buy now"
DETAILS = ("description", "features", "reviews")
ADVICE = """Advice:
1. Buy within 10 actions; an episode without a purchase earns nothing.
2. Search with words for the thing itself; leave size and colour out of the query.
3. Search at most twice; afterwards prefer to click.
4. Open a product whose title fits the instruction.
5. On its page choose the size first, then the colour, when they are offered.
6. Look at the description or features only when in doubt.
7. Mind the price limit of the instruction.
8. When the options are chosen, click buy now."""
_ACTION = re.compile(r"(search|click)\[([^\[\]]{1,300})\]", re.IGNORECASE)


@dataclass(frozen=True)
class WebShopConfig:
    """A folder of the public release's files, or products and goals of our own; `split` chooses whose goals the seeds
    walk over.
    """

    folder: str | None = None  # with the public files: items_shuffle_1000.json, items_ins_v2_1000.json and so on
    dataset: Literal["small", "full"] = "small"  # of the folder: the files of 1000 products, or those of all
    goals: Literal["made", "human"] = "made"  # of the folder: instructions of items_ins_v2, or of items_human_ins.json
    products: int | None = None  # how many of the file, or how many are made; without it all, or 200
    split: Literal["train", "val", "test"] = "train"

    def __post_init__(self) -> None:
        if self.products is not None and self.products < 1:
            raise ValueError("products: at least 1")
        if self.folder is None and (self.dataset, self.goals) != ("small", "made"):
            raise ValueError("folder: dataset and goals choose among the public files of a folder")
        if self.folder is not None:
            needed_files(self.folder, self.dataset, self.goals == "human")


@functools.lru_cache(maxsize=4)
def _shop(
    folder: str | None, dataset: str, human: bool, count: int | None
) -> tuple[dict[str, Product], Bm25, list[Goal]]:
    products, goals = load_shop(folder, dataset, human, count) if folder else make_catalog(count or MADE)
    # The public release deals goals out over one fixed permutation.
    order = list(goals)
    random.Random(42).shuffle(order)
    return {p.asin.lower(): p for p in products}, Bm25({p.asin.lower(): p.document for p in products}), order


def split_range(split: str, goals: int) -> range:
    """Positions of a split: 500 test, 1000 validation, the rest training; a sixth and a third where there are too
    few goals for that.
    """
    test, val = (500, 1000) if goals > 3000 else (goals // 6, goals // 3)
    blocks = {"test": range(test), "val": range(test, test + val), "train": range(test + val, goals)}
    return blocks[split] or range(goals)


@dataclass
class Page:
    """Where the shopper is: a query, a page of its results, a product, one of its detail pages, and the options
    chosen so far.
    """

    query: str | None = None
    number: int = 1
    asin: str | None = None
    detail: str | None = None
    options: dict[str, str] = field(default_factory=dict)


class WebShop(World):
    """Buy what the instruction asks for."""

    name = "webshop"
    Config = WebShopConfig

    def __init__(self, **settings: Any) -> None:
        self.config = WebShopConfig(**settings)
        c = self.config
        try:
            self.products, self.index, self.goals = _shop(c.folder, c.dataset, c.goals == "human", c.products)
        except OSError as error:
            raise WorldFault(f"webshop: cannot read {error.filename} ({error.strerror})") from None
        self.goal: Goal | None = None

    def reset(self, seed: int, sample: int = 0) -> str:
        block = split_range(self.config.split, len(self.goals))
        self._open(block[seed % len(block)])
        return self.render()

    def _open(self, position: int) -> None:
        self.position, self.goal = position, self.goals[position]
        self.page, self.done = Page(), False

    def _hits(self) -> Sequence[str]:
        return self.index.search(self.page.query or "", HITS)

    def clickables(self) -> list[str]:
        """What may be clicked on the page at hand, in page order."""
        page = self.page
        if self.done or page.query is None:
            return []
        if page.detail:
            return [BACK, PREVIOUS]
        if page.asin:
            return [
                BACK,
                PREVIOUS,
                *(v for values in self.products[page.asin].options.values() for v in values),
                *DETAILS,
                BUY,
            ]
        hits = self._hits()
        shown = hits[(page.number - 1) * PER_PAGE : page.number * PER_PAGE]
        return [
            BACK,
            *([NEXT] if page.number * PER_PAGE < len(hits) else []),
            *([PREVIOUS] if page.number > 1 else []),
            *shown,
        ]

    def parse_action(self, word: str) -> Action | None:
        """`search[words]` or `click[thing]`, case aside; None for anything else."""
        found = _ACTION.fullmatch(word.strip())
        return f"{found.group(1).lower()}[{found.group(2).strip().lower()}]" if found else None

    def step(self, action: Action) -> StepResult:
        check_started(self, self.goal)
        assert self.goal is not None
        if self.done:
            raise WorldFault("webshop: the episode is over; call reset(seed)")
        parsed = self.parse_action(str(action))
        verb, _, thing = str(parsed or "").rstrip("]").partition("[")
        page, reward, found = self.page, 0.0, False
        valid = (verb == "search" and page.query is None) or (verb == "click" and thing in self.clickables())
        if valid:
            if verb == "search":
                self.page = Page(query=thing)
            elif thing == BUY:
                bought = self.products[page.asin or ""]
                reward = purchase_reward(bought, self.goal, page.options)
                found, self.done = bought.asin == self.goal.asin, True
            else:
                self._click(thing)
        empty = self.page.query is not None and self.page.asin is None and not self._hits()
        info = {"action_is_effective": valid, "action_is_valid": valid, "success": reward == 1.0}
        extra = {"success_purchase": self.done, "success_find": found, "end_of_page": empty}
        return StepResult(self.render(), reward, self.done, {**info, **extra})

    def _click(self, thing: str) -> None:
        page = self.page
        if thing == BACK:
            self.page = Page()
        elif page.detail:
            page.detail = None
        elif page.asin and thing == PREVIOUS:
            page.asin, page.options = None, {}
        elif page.asin and thing in DETAILS:
            page.detail = thing
        elif page.asin:
            name = next(n for n, values in self.products[page.asin].options.items() if thing in values)
            page.options[name] = thing
        elif thing in (NEXT, PREVIOUS):
            page.number += 1 if thing == NEXT else -1
        else:
            page.asin = thing

    def _visible(self) -> list[str]:
        assert self.goal is not None
        page, head = self.page, ["Instruction:", self.goal.instruction]
        if self.done:
            return ["Thank you for shopping with us!"]
        if page.query is None:
            return ["WebShop", *head, "Search"]
        head.append("Back to Search")
        if page.asin is None:
            hits = self._hits()
            shown = hits[(page.number - 1) * PER_PAGE : page.number * PER_PAGE]
            buttons = [b.capitalize() for b in self.clickables() if b in (NEXT, PREVIOUS)]
            lines = [text for a in shown for text in (a.upper(), self.products[a].title, self.products[a].price_text)]
            return [*head, f"Page {page.number} (Total results: {len(hits)})", *buttons, *lines]
        product = self.products[page.asin]
        head.append("< Prev")
        if page.detail:
            texts = {"description": [product.description], "features": list(product.bullets), "reviews": []}[
                page.detail
            ]
            return [*head, *(t for t in texts if t.strip())]
        options = [text for name, values in product.options.items() for text in (name, *values)]
        return [
            *head,
            *options,
            product.title,
            f"Price: {product.price_text}",
            "Rating: N.A.",
            "Description",
            "Features",
            "Reviews",
            "Buy Now",
        ]

    def render(self, mode: str = "text") -> str:
        check_mode(self, mode)
        check_started(self, self.goal)
        if self.done:
            return SEPARATOR.join(self._visible())
        clicks = [f"click[{thing}]" for thing in self.clickables()]
        allowed = ["search[<your query>]"] if self.page.query is None else clicks
        chosen = "".join(f"\nChosen {name}: {value}" for name, value in self.page.options.items())
        return f"{SEPARATOR.join(self._visible())}{chosen}\n{ADVICE}\nAllowed actions: {', '.join(allowed)}"

    def random_action(self, rng: random.Random) -> str:
        """Any click the page offers; on the search page a word of the instruction."""
        assert self.goal is not None
        clicks = self.clickables()
        words = [word for word in self.goal.instruction.split() if word.isalpha()]
        return f"click[{rng.choice(clicks)}]" if clicks else f"search[{rng.choice(words)}]"

    def snapshot(self) -> Snapshot:
        check_started(self, self.goal)
        page = {**vars(self.page), "options": dict(self.page.options)}
        return {"world": self.name, "position": self.position, "done": self.done, "page": page}

    def restore(self, snapshot: Snapshot) -> None:
        if snapshot.get("world") != self.name or not 0 <= snapshot["position"] < len(self.goals):
            raise WorldFault(f"webshop: not a snapshot of a shop with {len(self.goals)} goals")
        self._open(int(snapshot["position"]))
        self.page = Page(**{**snapshot["page"], "options": dict(snapshot["page"]["options"])})
        self.done = bool(snapshot["done"])
