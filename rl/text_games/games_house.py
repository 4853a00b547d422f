"""Games of the house: washing, light, locks, paint."""

from __future__ import annotations

import random
from typing import ClassVar

from .engine import Game, State, Thing, device, holder, plain


class Laundry(Game):
    name = "wash-shirt"
    task = "Your task is to wash and dry the clothes and to put them in the basket."
    room = "laundry room"
    own_verbs: ClassVar[dict[str, str]] = {
        "add {} to {}": (
            "A Soap that is held goes into a Washer: the washer's soap becomes True and the soap is gone (removed)."
        )
    }
    classes: ClassVar[dict[str, str]] = {
        "Washer": "A container that opens, and a device. soap, and left: minutes of the programme. Tick: while on and "
        "closed, left falls by 1. At 0 it turns off, left becomes 2 again, all Clothes in it become wet "
        "(isWet), and clean (isDirty = False) if there was soap, which is then used up (soap = False).",
        "Rack": (
            "A container. Tick: wet Clothes on it gain 1 drying; at 2 they are dry (isWet = False) and drying is "
            "0 again."
        ),
        "Clothes": "isDirty, isWet, drying.",
    }
    score_rules = (
        "One point for each piece that is clean, one more if it is clean, dry and in the basket. Won, and over, when "
        "all pieces are."
    )

    def build(self, s: State, rng: random.Random) -> None:
        s.add(
            "washer", "Washer", holder(openable=True, open=rng.random() < 0.5, soap=False, left=2, **device()), s.room
        )
        s.add("rack", "Rack", holder(prefix="on"), s.room)
        basket = s.add("basket", "Basket", holder(), s.room)
        s.add(rng.choice(["bar of soap", "soap powder"]), "Soap", plain(), s.room)
        for label in rng.sample(["shirt", "sock", "scarf", "towel"], rng.choice([1, 1, 2])):
            s.add(label, "Clothes", plain(isDirty=True, isWet=False, drying=0), basket)

    def do_add(self, s: State, soap: Thing, washer: Thing) -> str:
        if soap.type != "Soap" or washer.type != "Washer" or not s.has(soap) or washer["soap"]:
            return "That does not work."
        washer["soap"] = True
        s.remove(soap)
        return "The soap is in."

    def tick(self, s: State) -> None:
        washer, rack = s.one("Washer"), s.one("Rack")
        for thing in s.inside(rack):
            if thing.type == "Clothes" and thing["isWet"]:
                thing["drying"] += 1
                if thing["drying"] == 2:
                    thing["isWet"], thing["drying"] = False, 0
        if not washer["isOn"] or washer["isOpen"]:
            return
        washer["left"] -= 1
        if washer["left"] == 0:
            washer["isOn"], washer["left"] = False, 2
            for thing in s.inside(washer):
                if thing.type == "Clothes":
                    thing["isWet"] = True
                    thing["isDirty"] = thing["isDirty"] and not washer["soap"]
            washer["soap"] = False

    def points(self, s: State) -> tuple[int, bool, bool]:
        pieces, basket = s.of("Clothes"), s.one("Basket")
        clean = [p for p in pieces if not p["isDirty"]]
        done = [p for p in clean if not p["isWet"] and p.uuid in basket.contains]
        won = len(done) == len(pieces)
        return len(clean) + len(done), won, won

    def expert(self, s: State) -> str:
        washer, rack, basket = s.one("Washer"), s.one("Rack"), s.one("Basket")
        pieces = s.of("Clothes")
        dirty = [p for p in pieces if p["isDirty"]]
        if dirty:
            if washer["isOn"]:
                return "close washer" if washer["isOpen"] else "inventory"
            outside = [p for p in dirty if p.uuid not in washer.contains]
            if outside:
                return self.fetch(s, outside[0], washer) if washer["isOpen"] else "open washer"
            if not washer["soap"]:
                soap = s.one("Soap")
                return f"add {soap.label} to washer" if s.has(soap) else f"take {soap.label}"
            return "turn on washer"
        if not washer["isOpen"]:
            return "open washer"
        wet = [p for p in pieces if p["isWet"] and p.uuid not in rack.contains]
        if wet:
            return self.fetch(s, wet[0], rack)
        dry = [p for p in pieces if not p["isWet"] and p.uuid not in basket.contains]
        return self.fetch(s, dry[0], basket) if dry else "look around"


class Candle(Game):
    name = "read-by-candle"
    task = "Your task is to read the letter by the light of a candle."
    room = "dark attic"
    boxes = False
    devices = False
    own_verbs: ClassVar[dict[str, str]] = {
        "light {} with {}": "A Candle with wax left that does not burn is lit (isLit = True) with a Match that is "
        "held; the match is gone (removed).",
        "read {}": "A Letter that is held, while a candle burns: pagesRead rises by 1, up to pages.",
    }
    classes: ClassVar[dict[str, str]] = {
        "Candle": "wax, isLit. Tick: while lit, wax falls by 1; at 0 it goes out (isLit = False).",
        "Match": "Moveable. No tick.",
        "Letter": "pages, pagesRead. No tick.",
    }
    score_rules = (
        "One point for each page read. Won, and over, when all are read. Lost, and over, when pages are left but no "
        "light can be made: no candle burns, and there is no match or no candle with wax."
    )

    def build(self, s: State, rng: random.Random) -> None:
        shelf = s.add("shelf", "Container", holder(prefix="on"), s.room)
        for label in rng.sample(["red candle", "white candle", "stump"], rng.choice([1, 2])):
            s.add(label, "Candle", plain(rng.random() < 0.5, wax=rng.choice([3, 4, 5]), isLit=False), shelf)
        for label in rng.sample(["long match", "short match", "bent match"], rng.choice([2, 3])):
            s.add(label, "Match", plain(), shelf)
        s.add("letter", "Letter", plain(pages=rng.choice([1, 2]), pagesRead=0), s.room)

    def do_light(self, s: State, candle: Thing, match: Thing) -> str:
        if candle.type != "Candle" or match.type != "Match" or not s.has(match) or candle["isLit"] or not candle["wax"]:
            return "That does not burn."
        candle["isLit"] = True
        s.remove(match)
        return f"The {candle.label} burns."

    def do_read(self, s: State, letter: Thing) -> str:
        if letter.type != "Letter" or not s.has(letter) or not any(c["isLit"] for c in s.of("Candle")):
            return "You cannot read that now."
        letter["pagesRead"] = min(letter["pages"], letter["pagesRead"] + 1)
        return "You read a page."

    def tick(self, s: State) -> None:
        for candle in s.of("Candle"):
            if candle["isLit"]:
                candle["wax"] -= 1
                candle["isLit"] = candle["wax"] > 0

    def points(self, s: State) -> tuple[int, bool, bool]:
        letter, candles = s.one("Letter"), s.of("Candle")
        won = letter["pagesRead"] == letter["pages"]
        dark = not any(c["isLit"] for c in candles) and not (s.of("Match") and any(c["wax"] for c in candles))
        return letter["pagesRead"], won or dark, won

    def expert(self, s: State) -> str:
        letter = s.one("Letter")
        if not s.has(letter):
            return "take letter"
        if any(c["isLit"] for c in s.of("Candle")):
            return "read letter"
        match = s.of("Match")[0]
        candle = max(s.of("Candle"), key=lambda c: c["wax"])
        return f"light {candle.label} with {match.label}" if s.has(match) else f"take {match.label}"


class Strongbox(Game):
    name = "open-strongbox"
    task = "Your task is to bring the coin from the strongbox to the shelf."
    room = "vault"
    devices = False
    own_verbs: ClassVar[dict[str, str]] = {
        "unlock {} with {}": "A Strongbox that is locked and a Key that is held, of the same shape: isLocked becomes "
        "False and timer becomes delay."
    }
    classes: ClassVar[dict[str, str]] = {
        "Strongbox": "A container that opens once it is not locked (isOpenable is the opposite of isLocked). shape, "
        "timer, delay. Tick: while it is unlocked and closed, timer falls by 1; at 0 it locks again "
        "(isLocked = True, isOpenable = False).",
        "Key": "shape. No tick.",
        "Coin": "Moveable. No tick.",
    }
    score_rules = (
        "One point while the strongbox is unlocked or the coin is out of it, two points when the coin is on the shelf, "
        "which wins and ends the game."
    )

    def build(self, s: State, rng: random.Random) -> None:
        shapes = rng.sample(["star", "ring", "cross", "square"], rng.choice([2, 3]))
        box = holder(openable=False, open=False, isLocked=True, shape=shapes[0], timer=0, delay=rng.choice([2, 3]))
        strongbox = s.add("strongbox", "Strongbox", box, s.room)
        s.add(rng.choice(["gold coin", "silver coin"]), "Coin", plain(), strongbox)
        s.add("shelf", "Shelf", holder(prefix="on"), s.room)
        drawer = s.add("drawer", "Container", holder(openable=True, open=rng.random() < 0.5), s.room)
        for shape in rng.sample(shapes, len(shapes)):
            s.add(f"{shape} key", "Key", plain(shape=shape), rng.choice([drawer, s.room]))

    def do_unlock(self, s: State, box: Thing, key: Thing) -> str:
        if (
            box.type != "Strongbox"
            or key.type != "Key"
            or not s.has(key)
            or not box["isLocked"]
            or box["shape"] != key["shape"]
        ):
            return "It does not fit."
        box["isLocked"], box["isOpenable"], box["timer"] = False, True, box["delay"]
        return "It clicks."

    def tick(self, s: State) -> None:
        box = s.one("Strongbox")
        if not box["isLocked"] and not box["isOpen"]:
            box["timer"] -= 1
            if box["timer"] <= 0:
                box["isLocked"], box["isOpenable"], box["timer"] = True, False, 0

    def points(self, s: State) -> tuple[int, bool, bool]:
        box, coin = s.one("Strongbox"), s.one("Coin")
        won = coin.uuid in s.one("Shelf").contains
        return 2 if won else int(not box["isLocked"] or coin.uuid not in box.contains), won, won

    def expert(self, s: State) -> str:
        box, coin, drawer = s.one("Strongbox"), s.one("Coin"), s.one("Container")
        if coin.uuid not in box.contains:
            return self.fetch(s, coin, s.one("Shelf"))
        if box["isOpen"]:
            return f"take {coin.label}"
        if not box["isLocked"]:
            return "open strongbox"
        key = next(k for k in s.of("Key") if k["shape"] == box["shape"])
        if s.has(key):
            return f"unlock strongbox with {key.label}"
        return "open drawer" if key.uuid in drawer.contains and not drawer["isOpen"] else f"take {key.label}"


MIXES = {
    frozenset(("red", "blue")): "purple",
    frozenset(("red", "yellow")): "orange",
    frozenset(("blue", "yellow")): "green",
}


class Paint(Game):
    name = "mix-colours"
    task = "Your task is to mix the wanted colour and to paint the fence with it."
    room = "yard"
    boxes = False
    devices = False
    own_verbs: ClassVar[dict[str, str]] = {
        "mix {}": "A Bowl that holds exactly two Paints of different colours that make a third (red and blue: purple, "
        "red and yellow: orange, blue and yellow: green): both are gone (removed) and a new Paint of that "
        "colour, named '<colour> paint', is in the bowl.",
        "paint {} with {}": (
            "A Fence and a Paint that is reachable and moist: the fence's colour becomes the paint's and coats "
            "rises by 1."
        ),
    }
    classes: ClassVar[dict[str, str]] = {
        "Paint": (
            "colour; moisture: Tick: outside of a Bowl it falls by 1 down to 0. It is moist while moisture is above 0."
        ),
        "Bowl": "A container. No tick.",
        "Fence": "colour, wanted, coats. No tick.",
    }
    score_rules = "One point for a paint of the wanted colour, two when the fence has it, which wins and ends the game."

    def build(self, s: State, rng: random.Random) -> None:
        pair = rng.choice(sorted(sorted(p) for p in MIXES))
        s.add("fence", "Fence", plain(False, colour="grey", wanted=MIXES[frozenset(pair)], coats=0), s.room)
        s.add(rng.choice(["bowl", "bucket"]), "Bowl", holder(rng.random() < 0.5), s.room)
        for colour in rng.sample(["red", "blue", "yellow"], 3) if rng.random() < 0.5 else pair:
            s.add(f"{colour} paint", "Paint", plain(colour=colour, moisture=rng.choice([9, 12])), s.room)

    def do_mix(self, s: State, bowl: Thing) -> str:
        paints = s.inside(bowl) if bowl.type == "Bowl" else []
        colour = MIXES.get(frozenset(p["colour"] for p in paints)) if len(paints) == 2 else None
        if colour is None:
            return "That mixes to nothing."
        for paint in paints:
            s.remove(paint)
        s.add(f"{colour} paint", "Paint", plain(colour=colour, moisture=9), bowl)
        return f"You mix {colour}."

    def do_paint(self, s: State, fence: Thing, paint: Thing) -> str:
        if fence.type != "Fence" or paint.type != "Paint" or not paint["moisture"]:
            return "That does not work."
        fence["colour"], fence["coats"] = paint["colour"], fence["coats"] + 1
        return f"The fence is {paint['colour']}."

    def tick(self, s: State) -> None:
        bowl = s.one("Bowl")
        for paint in s.of("Paint"):
            if paint.uuid not in bowl.contains:
                paint["moisture"] = max(0, paint["moisture"] - 1)

    def points(self, s: State) -> tuple[int, bool, bool]:
        fence = s.one("Fence")
        won = fence["colour"] == fence["wanted"]
        return 2 if won else int(any(p["colour"] == fence["wanted"] for p in s.of("Paint"))), won, won

    def expert(self, s: State) -> str:
        fence, bowl = s.one("Fence"), s.one("Bowl")
        ready = [p for p in s.of("Paint") if p["colour"] == fence["wanted"]]
        if ready:
            return f"paint fence with {ready[0].label}"
        needed = next(pair for pair, made in MIXES.items() if made == fence["wanted"])
        out = [p for p in s.of("Paint") if p["colour"] in needed and p.uuid not in bowl.contains]
        return self.fetch(s, out[0], bowl) if out else f"mix {bowl.label}"
