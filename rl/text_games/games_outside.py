"""Games of plants, animals, water, electricity and weights."""

from __future__ import annotations

import random
from typing import ClassVar

from .engine import Game, State, Thing, device, holder, plain


class Greenhouse(Game):
    name = "grow-tomato"
    task = "Your task is to grow a tomato from the seed and to pick it."
    room = "greenhouse"
    boxes = False
    own_verbs: ClassVar[dict[str, str]] = {
        "water {} with {}": (
            "A Pot and a Can that is held with water left: the pot's moisture becomes 3, the can's water falls by 1."
        ),
        "pick {}": "A Fruit that is in a pot moves to the agent.",
    }
    classes: ClassVar[dict[str, str]] = {
        "Lamp": "A device. No tick.",
        "Pot": "A container. moisture. Tick: if a Seed is in it, the moisture is above 0 and the lamp is on, the seed "
        "gains 1 growth. Then moisture falls by 1 down to 0.",
        "Seed": "growth, ripeAt, isMoveable (False once growth is above 0). When growth reaches ripeAt, a new Fruit "
        "named 'tomato' comes into being in the pot and growth goes back to 1.",
        "Can": "water. No tick.",
        "Fruit": "Moveable. No tick.",
    }
    score_rules = (
        "One point once something has grown, two when a fruit exists, three when the agent holds one, which wins and "
        "ends the game."
    )

    def build(self, s: State, rng: random.Random) -> None:
        s.add("lamp", "Lamp", plain(False, **device(rng.random() < 0.4)), s.room)
        table = s.add("table", "Container", holder(prefix="on"), s.room)
        s.add("pot", "Pot", holder(moisture=rng.choice([0, 1])), s.room)
        s.add("seed", "Seed", plain(growth=0, ripeAt=rng.choice([2, 3])), table)
        s.add(rng.choice(["watering can", "old can"]), "Can", plain(water=rng.choice([2, 3])), table)
        if rng.random() < 0.5:
            s.add("rake", "GameObject", plain(), s.room)

    def do_water(self, s: State, pot: Thing, can: Thing) -> str:
        if pot.type != "Pot" or can.type != "Can" or not s.has(can) or not can["water"]:
            return "That does not work."
        pot["moisture"], can["water"] = 3, can["water"] - 1
        return "The soil is wet."

    def do_pick(self, s: State, fruit: Thing) -> str:
        if fruit.type != "Fruit" or fruit.uuid not in s.one("Pot").contains:
            return "There is nothing to pick."
        s.move(fruit, s.agent)
        return "You pick it."

    def tick(self, s: State) -> None:
        pot, seed, lamp = s.one("Pot"), s.one("Seed"), s.one("Lamp")
        if seed.uuid in pot.contains and pot["moisture"] > 0 and lamp["isOn"]:
            seed["growth"] += 1
            seed["isMoveable"] = False
            if seed["growth"] >= seed["ripeAt"]:
                seed["growth"] = 1
                s.add("tomato", "Fruit", plain(), pot)
        pot["moisture"] = max(0, pot["moisture"] - 1)

    def points(self, s: State) -> tuple[int, bool, bool]:
        fruits = s.of("Fruit")
        won = any(s.has(f) for f in fruits)
        return 3 if won else 2 if fruits else int(s.one("Seed")["growth"] > 0), won, won

    def expert(self, s: State) -> str:
        pot, seed, can = s.one("Pot"), s.one("Seed"), s.one("Can")
        if s.of("Fruit"):
            return "pick tomato"
        if seed.uuid not in pot.contains:
            return self.fetch(s, seed, pot)
        if not s.one("Lamp")["isOn"]:
            return "turn on lamp"
        if not pot["moisture"]:
            return f"water pot with {can.label}" if s.has(can) else f"take {can.label}"
        return "look around"


class Aquarium(Game):
    name = "feed-fish"
    task = "Your task is to feed every fish before it starves."
    room = "aquarium hall"
    own_verbs: ClassVar[dict[str, str]] = {
        "feed {} with {}": "A Fish that lives and a Food that is held with portions left: hunger becomes 0, fed True, "
        "portions falls by 1; food without portions is gone (removed)."
    }
    devices = False
    classes: ClassVar[dict[str, str]] = {
        "Fish": "hunger, fed, isAlive. Tick: a living fish gains 1 hunger; at 9 it is no longer alive.",
        "Food": "portions. No tick.",
        "Tank": "A container with a lid that opens; fish are reached only while it is open. No tick.",
    }
    score_rules = (
        "One point for each fish that was fed and lives, minus one for each that died. Won, and over, when all were "
        "fed and live. Lost, and over, when one died."
    )

    def build(self, s: State, rng: random.Random) -> None:
        tank = s.add("tank", "Tank", holder(openable=True, open=rng.random() < 0.5), s.room)
        labels = rng.sample(["goldfish", "guppy", "tetra"], rng.choice([1, 2]))
        for label in labels:
            s.add(label, "Fish", plain(False, hunger=rng.choice([0, 1, 2]), fed=False, isAlive=True), tank)
        cupboard = s.add("cupboard", "Container", holder(openable=True, open=rng.random() < 0.5), s.room)
        s.add(rng.choice(["flakes", "pellets"]), "Food", plain(portions=len(labels) + rng.choice([0, 1])), cupboard)
        s.add("net", "GameObject", plain(), rng.choice([s.room, cupboard]))

    def do_feed(self, s: State, fish: Thing, food: Thing) -> str:
        if fish.type != "Fish" or food.type != "Food" or not s.has(food) or not fish["isAlive"]:
            return "That does not work."
        fish["hunger"], fish["fed"] = 0, True
        food["portions"] -= 1
        if food["portions"] == 0:
            s.remove(food)
        return f"The {fish.label} eats."

    def tick(self, s: State) -> None:
        for fish in s.of("Fish"):
            if fish["isAlive"]:
                fish["hunger"] += 1
                fish["isAlive"] = fish["hunger"] < 9

    def points(self, s: State) -> tuple[int, bool, bool]:
        fish = s.of("Fish")
        well, dead = sum(f["fed"] and f["isAlive"] for f in fish), sum(not f["isAlive"] for f in fish)
        return well - dead, well == len(fish) or dead > 0, well == len(fish)

    def expert(self, s: State) -> str:
        tank, cupboard = s.one("Tank"), s.one("Container")
        food = s.one("Food")
        if not s.has(food):
            return f"take {food.label}" if cupboard["isOpen"] else "open cupboard"
        if not tank["isOpen"]:
            return "open tank"
        return f"feed {next(f for f in s.of('Fish') if not f['fed']).label} with {food.label}"


class Bucket(Game):
    name = "fill-bucket"
    task = "Your task is to fill the bucket to the mark without a flood and to set it on the cart."
    room = "wash house"
    boxes = False
    own_verbs: ClassVar[dict[str, str]] = {"empty {}": "A Bucket that is held: water becomes 0."}
    classes: ClassVar[dict[str, str]] = {
        "Tap": "A device. flow. Tick: while on, a Bucket in the sink gains flow water, at most its capacity; what is "
        "too much, or all of it when no bucket is there, goes to the floor.",
        "Bucket": "capacity, mark, water. No tick.",
        "Floor": "flood: water on the floor. No tick.",
        "Sink": "A container. No tick.",
    }
    score_rules = (
        "One point when the water is at the mark or above, two when that bucket is on the cart, which wins and ends "
        "the game. Lost, and over, when the flood is 6 or more."
    )

    def build(self, s: State, rng: random.Random) -> None:
        s.add("tap", "Tap", plain(False, flow=rng.choice([1, 2, 3]), **device()), s.room)
        s.add("sink", "Sink", holder(), s.room)
        s.add("floor", "Floor", plain(False, flood=0), s.room)
        s.add("cart", "Cart", holder(prefix="on"), s.room)
        mark = rng.choice([3, 4, 6])
        start = rng.choice([0, 1])
        s.add("bucket", "Bucket", plain(capacity=mark + rng.choice([0, 2]), mark=mark, water=start), s.room)
        if rng.random() < 0.5:
            s.add("sponge", "GameObject", plain(), s.room)

    def do_empty(self, s: State, bucket: Thing) -> str:
        if bucket.type != "Bucket" or not s.has(bucket):
            return "You cannot empty that."
        bucket["water"] = 0
        return "You empty it."

    def tick(self, s: State) -> None:
        tap, bucket, floor = s.one("Tap"), s.one("Bucket"), s.one("Floor")
        if not tap["isOn"]:
            return
        room = bucket["capacity"] - bucket["water"] if bucket.uuid in s.one("Sink").contains else 0
        poured = min(room, tap["flow"])
        bucket["water"] += poured
        floor["flood"] += tap["flow"] - poured

    def points(self, s: State) -> tuple[int, bool, bool]:
        bucket = s.one("Bucket")
        full = bucket["water"] >= bucket["mark"]
        won = full and bucket.uuid in s.one("Cart").contains
        return full + won, won or s.one("Floor")["flood"] >= 6, won

    def expert(self, s: State) -> str:
        tap, bucket, sink = s.one("Tap"), s.one("Bucket"), s.one("Sink")
        if bucket["water"] >= bucket["mark"]:
            return "turn off tap" if tap["isOn"] else self.fetch(s, bucket, s.one("Cart"))
        if bucket.uuid not in sink.contains:
            return self.fetch(s, bucket, sink)
        return "look around" if tap["isOn"] else "turn on tap"


class Torch(Game):
    name = "charge-torch"
    task = "Your task is to charge the battery, put it in the torch and turn the torch on."
    room = "cellar"
    boxes = False
    classes: ClassVar[dict[str, str]] = {
        "Charger": "A container and device. Tick: while on, a Battery in it gains rate charge, up to 100.",
        "Torch": "A container and device. isBright. Tick: bright if it is on and holds a Battery with charge above 0, "
        "which then loses 10 charge; not bright otherwise.",
        "Battery": "charge. Tick: see Charger and Torch.",
    }
    score_rules = (
        "One point when a battery has 50 charge or more, or the torch is bright. Two when it is bright, which wins "
        "and ends the game."
    )

    def build(self, s: State, rng: random.Random) -> None:
        s.add("charger", "Charger", holder(rate=rng.choice([20, 30, 50]), **device(rng.random() < 0.3)), s.room)
        bench = s.add("bench", "Container", holder(prefix="on"), s.room)
        s.add("torch", "Torch", holder(True, isBright=False, **device()), bench)
        for label in rng.sample(["red battery", "blue battery", "tiny battery"], rng.choice([1, 2])):
            s.add(label, "Battery", plain(charge=0), rng.choice([bench, s.room]))

    def tick(self, s: State) -> None:
        charger, torch = s.one("Charger"), s.one("Torch")
        for battery in s.of("Battery"):
            if charger["isOn"] and battery.uuid in charger.contains:
                battery["charge"] = min(100, battery["charge"] + charger["rate"])
        loaded = [t for t in s.inside(torch) if t.type == "Battery" and t["charge"] > 0]
        torch["isBright"] = bool(torch["isOn"] and loaded)
        if torch["isBright"]:
            loaded[0]["charge"] = max(0, loaded[0]["charge"] - 10)

    def points(self, s: State) -> tuple[int, bool, bool]:
        bright = s.one("Torch")["isBright"]
        return 2 if bright else int(any(b["charge"] >= 50 for b in s.of("Battery"))), bright, bright

    def expert(self, s: State) -> str:
        charger, torch, battery = s.one("Charger"), s.one("Torch"), s.of("Battery")[0]
        if battery["charge"] < 50:
            if battery.uuid not in charger.contains:
                return self.fetch(s, battery, charger)
            return "inventory" if charger["isOn"] else "turn on charger"
        return "turn on torch" if battery.uuid in torch.contains else self.fetch(s, battery, torch)


class Scale(Game):
    name = "weigh-stones"
    task = "Your task is to find the heaviest stone with the scale and to put it in the crate."
    room = "quarry"
    boxes = False
    classes: ClassVar[dict[str, str]] = {
        "Scale": "A container and device. display: Tick: while off, None; while on, it moves from what it showed (0 if "
        "None) towards the sum of the weights of what lies on it, by 4 at most.",
        "Stone": "weight. No tick.",
        "Crate": "A container. No tick.",
    }
    score_rules = (
        "One point when the display shows the weight of the heaviest stone. Two when only that stone is in the crate, "
        "which wins and ends the game. Lost, and over, when another stone is in the crate."
    )

    def build(self, s: State, rng: random.Random) -> None:
        s.add("scale", "Scale", holder(prefix="on", display=None, **device()), s.room)
        s.add("crate", "Crate", holder(), s.room)
        weights = rng.sample(range(2, 12), 3)
        for label, weight in zip(
            rng.sample(["red stone", "grey stone", "black stone", "white stone"], rng.choice([2, 3])),
            weights,
            strict=False,
        ):
            s.add(label, "Stone", plain(weight=weight), s.room)

    def tick(self, s: State) -> None:
        scale = s.one("Scale")
        shown, true = scale["display"] or 0, sum(t["weight"] or 0 for t in s.inside(scale))
        scale["display"] = shown + max(-4, min(4, true - shown)) if scale["isOn"] else None

    def points(self, s: State) -> tuple[int, bool, bool]:
        best = max(t["weight"] for t in s.of("Stone"))
        packed = [t["weight"] for t in s.inside(s.one("Crate"))]
        won = packed == [best]
        return 2 if won else int(s.one("Scale")["display"] == best), bool(packed), won

    def expert(self, s: State) -> str:
        scale, best = s.one("Scale"), max(s.of("Stone"), key=lambda t: t["weight"])
        if scale["isOn"]:
            weighing = best.uuid in scale.contains and scale["display"] < best["weight"]
            return "inventory" if weighing else self.fetch(s, best, s.one("Crate"))
        return "turn on scale" if best.uuid in scale.contains else self.fetch(s, best, scale)
