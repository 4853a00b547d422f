"""The reward of a purchase in WebShop."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from .webshop_catalog import Goal, Product

FUZZY_MATCH = 85
_WORD = re.compile(r"[a-z0-9]+")
STOP_WORDS = frozenset(
    "a an and are as at be but by for from has have i if im in into is it its like looking me my need no not of on or "
    "than that the their "
    "then there these they this to under want was will with would you your find get buy price lower dollars".split()
)
# Words that name a quality, an amount or a colour rather than a thing: not counted as nouns below.
QUALITIES = frozenset(
    "new best good great high low long short small medium large big little mini extra quality easy natural soft hard "
    "light heavy dry free pack set pcs piece pieces count inch inches oz ounce ml lb lbs women womens men mens black "
    "white red blue green grey gray pink purple yellow orange brown gold silver beige navy multicolor wine rose dark "
    "pointed sexy elegant solid reclaimed sun".split()
)

COLOURS = sorted(
    "amber apricot aqua ash beige black blue blush bronze brown burgundy camel camo caramel champagne charcoal "
    "chestnut chocolate coffee copper coral cream crystal dark denim espresso fuchsia gold graphite gray green grey "
    "heather indigo ivory khaki lavender lemon leopard light lilac lime magenta maroon mauve mint mocha mustard "
    "natural navy nude olive orange peach pink plum purple rainbow red rose royal rust sand sapphire silver slate "
    "steel stone tan taupe teal tiger turquoise violet walnut wheat white wine yellow".split()
)


def words(text: str) -> list[str]:
    """Lower-case words and numbers without stop words; a plural s is cut off."""
    found = (w for w in _WORD.findall(text.lower()) if w not in STOP_WORDS)
    return [w[:-1] if len(w) > 3 and w.endswith("s") and not w.endswith("ss") else w for w in found]


def _common(a: str, b: str) -> int:
    """Length of the longest common subsequence, one machine-integer row at a time."""
    masks: dict[str, int] = defaultdict(int)
    for i, char in enumerate(a):
        masks[char] |= 1 << i
    row, full = (1 << len(a)) - 1, (1 << len(a)) - 1
    for char in b:
        hit = row & masks.get(char, 0)
        row = ((row + hit) | (row - hit)) & full
    return len(a) - row.bit_count()


def ratio(a: str, b: str) -> int:
    """Similarity in 0..100: twice the common subsequence over both lengths."""
    return round(200 * _common(a, b) / (len(a) + len(b))) if a or b else 100


def token_set_ratio(a: str, b: str) -> int:
    """Similarity of two word sets in 0..100: words in common count whole, the rest by `ratio`."""
    left, right = set(_WORD.findall(a.lower())), set(_WORD.findall(b.lower()))
    if not left or not right:
        return 0
    both = " ".join(sorted(left & right))
    if both and (left <= right or right <= left):
        return 100
    one = f"{both} {' '.join(sorted(left - right))}".strip()
    two = f"{both} {' '.join(sorted(right - left))}".strip()
    best = ratio(one, two)
    return max(best, ratio(both, one), ratio(both, two)) if both else best


def nouns(title: str) -> set[str]:
    """The words that stand for nouns here: no tagger is used, only stop words, numbers and known qualities are taken
    out.
    """
    return {w for w in words(title) if not any(c.isdigit() for c in w) and w not in QUALITIES and len(w) > 1}


def type_score(bought: Product, goal: Goal) -> float:
    """How far the thing bought is of the wanted kind: 1, 0.5, 0.1 or 0."""
    levels = {level.strip() for level in bought.category.split("›")} & {
        level.strip() for level in goal.category.split("›")
    }
    wanted = nouns(goal.title)
    overlap = len(nouns(bought.title) & wanted) / len(wanted) if wanted else 0.2
    if overlap == 0.0:
        return 0.0
    if overlap < 0.1:
        return 0.1
    return 1.0 if bought.query == goal.query or len(levels) >= 2 or overlap > 0.2 else 0.5


def _any_match(wanted: str, offered: Iterable[str]) -> bool:
    return any(token_set_ratio(item, wanted) > FUZZY_MATCH for item in offered)


def plain_colour(value: str) -> str:
    """The first of the known colours, by alphabet, that an option's value holds; without any the value."""
    return next((colour for colour in COLOURS if colour in value), value)


def purchase_reward(bought: Product, goal: Goal, options: dict[str, str]) -> float:
    """Share of wanted attributes, options and price met, times the type score."""
    described = [text.lower() for text in (bought.title, " ".join(bought.bullets), bought.description)]
    attributes = sum(_any_match(a, bought.attributes) or any(a in text for text in described) for a in goal.attributes)
    offered = [plain_colour(value) for value in options.values()]
    chosen = sum(_any_match(plain_colour(value), offered) for value in goal.options)
    priced = bought.price <= goal.price_cap
    return type_score(bought, goal) * (attributes + chosen + priced) / (len(goal.attributes) + len(goal.options) + 1)
