"""Games of heat, cold and food."""

from __future__ import annotations

import random
from typing import ClassVar

from .engine import Game, State, Thing, device, holder, plain


class Toast(Game):
    """The example game: its rows only ever stand in prompts."""

    name = "toast-bread"
    task = "Your task is to toast the bread without burning it."
    room = "kitchen"
    boxes = False
    classes: ClassVar[dict[str, str]] = {
        "Toaster": (
            "A container and device. Tick: while it is on, every Bread in it gains 1 toasting; once one has 2 or "
            "more it turns off."
        ),
        "Bread": "toasting: 0 is raw, 2 or 3 is toasted, 4 or more is burnt.",
    }
    score_rules = (
        "One point for each toasted bread. Won, and over, when every bread is toasted. Lost, and over, when one "
        "is burnt."
    )

    def build(self, s: State, rng: random.Random) -> None:
        s.add("toaster", "Toaster", holder(**device()), s.room)
        shelf = s.add("shelf", "Container", holder(prefix="on"), s.room)
        for label in rng.sample(["slice of rye bread", "slice of white bread", "bun"], rng.choice([1, 2])):
            s.add(label, "Bread", plain(toasting=0), shelf)
        s.add(rng.choice(["plate", "saucer"]), "Container", holder(True, prefix="on"), shelf)

    def tick(self, s: State) -> None:
        toaster = s.one("Toaster")
        if not toaster["isOn"]:
            return
        for thing in s.inside(toaster):
            if thing.type == "Bread":
                thing["toasting"] += 1
                if thing["toasting"] >= 2:
                    toaster["isOn"] = False

    def points(self, s: State) -> tuple[int, bool, bool]:
        levels = [t["toasting"] for t in s.of("Bread")]
        good = sum(2 <= n < 4 for n in levels)
        return good, good == len(levels) or max(levels) >= 4, good == len(levels)

    def expert(self, s: State) -> str:
        toaster = s.one("Toaster")
        raw = [t for t in s.of("Bread") if t.uuid not in toaster.contains]
        if raw:
            return self.fetch(s, raw[0], toaster)
        return "look around" if toaster["isOn"] else "turn on toaster"


class Bake(Game):
    name = "bake-loaf"
    task = "Your task is to bake the dough in the oven and to lay the loaf on the board."
    room = "bakery"
    classes: ClassVar[dict[str, str]] = {
        "Oven": "A container that opens, and a device. heat: its temperature. Tick: while on, heat rises by 50 up to "
        "200; while off, it falls by 50 down to 0. Then, if the oven is closed and heat is 100 or more, every "
        "Dough in it gains 1 baked.",
        "Dough": "baked: how long it was baked. At baked = bakeTime it becomes a loaf: its name changes to 'loaf' and "
        "isEdible to True. At baked = bakeTime + 2 it is burnt: the name becomes 'cinder' and isEdible False.",
    }
    score_rules = (
        "One point for a loaf, one more when the loaf is on the board, which wins and ends the game. A cinder ends "
        "the game, lost."
    )

    def build(self, s: State, rng: random.Random) -> None:
        s.add(
            "oven", "Oven", holder(openable=True, open=rng.random() < 0.3, heat=rng.choice([0, 50]), **device()), s.room
        )
        table = s.add("table", "Container", holder(prefix="on"), s.room)
        s.add("board", "Board", holder(True, prefix="on"), table)
        s.add("dough", "Dough", plain(baked=0, bakeTime=rng.choice([1, 2]), isEdible=False), table)
        for label in rng.sample(["whisk", "jar of flour", "apron", "spoon"], rng.choice([1, 2])):
            s.add(label, "GameObject", plain(), table)

    def tick(self, s: State) -> None:
        oven = s.one("Oven")
        oven["heat"] = min(200, oven["heat"] + 50) if oven["isOn"] else max(0, oven["heat"] - 50)
        if oven["isOpen"] or oven["heat"] < 100:
            return
        for thing in s.inside(oven):
            if thing.type == "Dough":
                thing["baked"] += 1
                if thing["baked"] == thing["bakeTime"]:
                    thing.label, thing.properties["isEdible"] = "loaf", True
                elif thing["baked"] == thing["bakeTime"] + 2:
                    thing.label, thing.properties["isEdible"] = "cinder", False

    def points(self, s: State) -> tuple[int, bool, bool]:
        dough, board = s.one("Dough"), s.one("Board")
        won = bool(dough["isEdible"]) and dough.uuid in board.contains
        return int(dough["isEdible"]) + won, won or dough.label == "cinder", won

    def expert(self, s: State) -> str:
        oven, dough = s.one("Oven"), s.one("Dough")
        inside = dough.uuid in oven.contains
        if dough["isEdible"]:
            return "open oven" if inside and not oven["isOpen"] else self.fetch(s, dough, s.one("Board"))
        if not inside:
            return self.fetch(s, dough, oven) if oven["isOpen"] else "open oven"
        if oven["isOn"]:
            return "close oven" if oven["isOpen"] else "inventory"
        return "turn on oven"


class Ices(Game):
    name = "freeze-ices"
    task = "Your task is to freeze the juice to ice lollies."
    room = "cold kitchen"
    own_verbs: ClassVar[dict[str, str]] = {
        "pour {} in {}": "A Jug that is held and has portions left fills a Mould that is empty: portions falls by 1, "
        "the mould's filling becomes the jug's flavour and its temperature 20."
    }
    classes: ClassVar[dict[str, str]] = {
        "Freezer": "A container that opens, and a device. Tick: see Mould.",
        "Jug": "flavour: what is in it; portions: how many moulds it still fills. No tick.",
        "Mould": "filling: None or a flavour; temperature; isFrozen. Tick: a filled mould in the freezer, closed and "
        "on, cools by 10 down to -10; anywhere else it warms by 5 up to 20. isFrozen is True at temperatures "
        "of 0 and below and False above 0.",
    }
    score_rules = "One point for each frozen mould. Won, and over, when every mould is frozen."

    def build(self, s: State, rng: random.Random) -> None:
        s.add("freezer", "Freezer", holder(openable=True, open=False, **device(rng.random() < 0.5)), s.room)
        counter = s.add("counter", "Container", holder(prefix="on"), s.room)
        labels = rng.sample(["star mould", "fish mould", "moon mould"], rng.choice([1, 2]))
        s.add("jug", "Jug", plain(flavour=rng.choice(["apple", "grape", "lemon"]), portions=len(labels)), counter)
        for label in labels:
            s.add(label, "Mould", plain(filling=None, temperature=20, isFrozen=False), counter)

    def do_pour(self, s: State, jug: Thing, mould: Thing) -> str:
        if (
            jug.type != "Jug"
            or mould.type != "Mould"
            or not s.has(jug)
            or not jug["portions"]
            or mould["filling"] is not None
        ):
            return "That does not work."
        jug["portions"] -= 1
        mould["filling"], mould["temperature"] = jug["flavour"], 20
        return f"You fill the {mould.label}."

    def tick(self, s: State) -> None:
        freezer = s.one("Freezer")
        cold = freezer["isOn"] and not freezer["isOpen"]
        for mould in s.of("Mould"):
            if mould["filling"] is None:
                continue
            inside = cold and mould.uuid in freezer.contains
            mould["temperature"] = max(-10, mould["temperature"] - 10) if inside else min(20, mould["temperature"] + 5)
            mould["isFrozen"] = mould["temperature"] <= 0

    def points(self, s: State) -> tuple[int, bool, bool]:
        moulds = s.of("Mould")
        frozen = sum(m["isFrozen"] for m in moulds)
        return frozen, frozen == len(moulds), frozen == len(moulds)

    def expert(self, s: State) -> str:
        freezer, jug = s.one("Freezer"), s.one("Jug")
        empty = [m for m in s.of("Mould") if m["filling"] is None]
        if empty:
            return f"pour jug in {empty[0].label}" if s.has(jug) else "take jug"
        outside = [m for m in s.of("Mould") if m.uuid not in freezer.contains]
        if outside:
            return self.fetch(s, outside[0], freezer) if freezer["isOpen"] else "open freezer"
        if not freezer["isOn"]:
            return "turn on freezer"
        return "close freezer" if freezer["isOpen"] else "inventory"


class Tea(Game):
    name = "brew-tea"
    task = "Your task is to brew a cup of tea with boiling water."
    room = "tea room"
    boxes = False
    own_verbs: ClassVar[dict[str, str]] = {
        "fill {} from {}": "An empty Kettle that is held is filled at a Tap: water becomes True, temperature 15.",
        "brew {} with {}": "A Cup with a TeaBag in it and water boiling (temperature 100) in the Kettle: the cup's "
        "drink becomes 'tea', the kettle's water False and its temperature 15, and the tea bag is "
        "gone (removed).",
    }
    classes: ClassVar[dict[str, str]] = {
        "Stove": "A container and device. Tick: while on, a Kettle with water on it warms by 25 up to 100.",
        "Kettle": "water, temperature. Tick: with water and not on a stove that is on, it cools by 5 down to 15.",
        "Cup": "A container. drink: None or 'tea'. No tick.",
        "TeaBag": "Moveable. No tick.",
        "Tap": "Where water comes from. No tick.",
    }
    score_rules = (
        "One point when water boils in the kettle or tea is made, one more for tea, which wins and ends the game."
    )

    def build(self, s: State, rng: random.Random) -> None:
        stove = s.add("stove", "Stove", holder(prefix="on", **device()), s.room)
        s.add("tap", "Tap", plain(False), s.room)
        shelf = s.add("shelf", "Container", holder(prefix="on"), s.room)
        s.add("kettle", "Kettle", plain(water=False, temperature=15), rng.choice([shelf, stove]))
        s.add(rng.choice(["cup", "mug", "bowl"]), "Cup", holder(True, drink=None), shelf)
        s.add(rng.choice(["green tea bag", "black tea bag"]), "TeaBag", plain(), shelf)
        if rng.random() < 0.5:
            s.add("spoon", "GameObject", plain(), shelf)

    def do_fill(self, s: State, kettle: Thing, tap: Thing) -> str:
        if kettle.type != "Kettle" or tap.type != "Tap" or not s.has(kettle) or kettle["water"]:
            return "That does not work."
        kettle["water"], kettle["temperature"] = True, 15
        return "You fill the kettle."

    def do_brew(self, s: State, cup: Thing, kettle: Thing) -> str:
        bags = [t for t in s.inside(cup) if t.type == "TeaBag"] if cup.type == "Cup" else []
        if not bags or kettle.type != "Kettle" or kettle["temperature"] < 100:
            return "That makes no tea."
        cup["drink"], kettle["water"], kettle["temperature"] = "tea", False, 15
        s.remove(bags[0])
        return "You brew tea."

    def tick(self, s: State) -> None:
        stove, kettle = s.one("Stove"), s.one("Kettle")
        if not kettle["water"]:
            return
        heated = stove["isOn"] and kettle.uuid in stove.contains
        kettle["temperature"] = min(100, kettle["temperature"] + 25) if heated else max(15, kettle["temperature"] - 5)

    def points(self, s: State) -> tuple[int, bool, bool]:
        made = any(c["drink"] == "tea" for c in s.of("Cup"))
        return (2 if made else int(s.one("Kettle")["temperature"] >= 100)), made, made

    def expert(self, s: State) -> str:
        stove, kettle, cup = s.one("Stove"), s.one("Kettle"), s.one("Cup")
        bag = s.one("TeaBag")
        if bag.uuid not in cup.contains:
            return self.fetch(s, bag, cup)
        if not kettle["water"]:
            return "fill kettle from tap" if s.has(kettle) else "take kettle"
        if kettle.uuid not in stove.contains:
            return self.fetch(s, kettle, stove)
        if not stove["isOn"]:
            return "turn on stove"
        return f"brew {cup.label} with kettle" if kettle["temperature"] >= 100 else "look around"
