"""A small engine for text games: a tree of things, actions by template, the passing of time, a score.

A game is a set of rules over a State; the whole state is visible in the properties and contents of its things, so that
a next state is a function of the state and the action. All chance is in how the seed builds the start.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from typing import Any, ClassVar

_NAMED = re.compile(r"(.+) \(ID: (\d+)\)")


@dataclass
class Thing:
    """One object; `contains` holds uuids."""

    uuid: int
    label: str
    type: str
    properties: dict[str, Any]
    contains: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.label} (ID: {self.uuid})"

    def __getitem__(self, key: str) -> Any:
        return self.properties.get(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self.properties[key] = value


def plain(moveable: bool = True, **more: Any) -> dict[str, Any]:
    """Properties of a thing that holds nothing."""
    return {"isContainer": False, "isMoveable": moveable, **more}


def holder(
    moveable: bool = False, openable: bool = False, open: bool = True, prefix: str = "in", **more: Any
) -> dict[str, Any]:
    """Properties of a container."""
    return {
        "isContainer": True,
        "isMoveable": moveable,
        "isOpenable": openable,
        "isOpen": open,
        "containerPrefix": prefix,
        **more,
    }


def device(on: bool = False) -> dict[str, Any]:
    """Properties of what can be turned on and off, to be joined with those of a thing or a container."""
    return {"isActivatable": True, "isOn": on}


@dataclass
class State:
    """Things by uuid in the order they came into being; the room is 0's holder and the agent is uuid 0."""

    things: dict[int, Thing] = field(default_factory=dict)
    next_uuid: int = 0

    def copy(self) -> State:
        made = {
            u: Thing(
                u,
                t.label,
                t.type,
                {k: list(v) if isinstance(v, list) else v for k, v in t.properties.items()},
                list(t.contains),
            )
            for u, t in self.things.items()
        }
        return State(made, self.next_uuid)

    def add(self, label: str, type: str, properties: dict[str, Any], inside: Thing | None = None) -> Thing:
        thing = Thing(self.next_uuid, label, type, properties)
        self.things[thing.uuid] = thing
        self.next_uuid += 1
        if inside is not None:
            inside.contains.append(thing.uuid)
        return thing

    def parent(self, thing: Thing) -> Thing | None:
        return next((t for t in self.things.values() if thing.uuid in t.contains), None)

    def move(self, thing: Thing, to: Thing) -> None:
        old = self.parent(thing)
        if old is not None:
            old.contains.remove(thing.uuid)
        to.contains.append(thing.uuid)

    def remove(self, thing: Thing) -> None:
        """Take a thing out of the game; what it held stays where it stood."""
        old = self.parent(thing)
        if old is not None:
            old.contains.remove(thing.uuid)
            old.contains.extend(thing.contains)
        del self.things[thing.uuid]

    def inside(self, container: Thing) -> list[Thing]:
        return [self.things[u] for u in container.contains]

    def of(self, type: str) -> list[Thing]:
        return [t for t in self.things.values() if t.type == type]

    def one(self, type: str) -> Thing:
        return self.of(type)[0]

    @property
    def agent(self) -> Thing:
        return self.things[0]

    @property
    def room(self) -> Thing:
        return self.things[1]

    def reachable(self) -> list[Thing]:
        """Everything but room and agent that is not shut away."""
        return list(self._walk(self.room))

    def _walk(self, container: Thing) -> Iterator[Thing]:
        for thing in self.inside(container):
            if thing is not self.agent:
                yield thing
            if thing["isContainer"] and thing["isOpen"]:
                yield from self._walk(thing)

    def holds(self, outer: Thing, inner: Thing) -> bool:
        """Whether inner lies in outer, at any depth."""
        return any(t is inner or self.holds(t, inner) for t in self.inside(outer))

    def has(self, thing: Thing) -> bool:
        """Whether the agent carries it."""
        return thing.uuid in self.agent.contains

    def objects(self) -> list[dict[str, Any]]:
        """The objects as rows hold them, the room first."""
        order = [self.room, self.agent, *(t for u, t in self.things.items() if u > 1)]
        return [
            {
                "name": t.name,
                "uuid": t.uuid,
                "type": t.type,
                "properties": {k: list(v) if isinstance(v, list) else v for k, v in t.properties.items()},
                "contains": [self.things[u].name for u in t.contains],
            }
            for t in order
        ]


COMMON = ("look around", "inventory", "examine {}", "take {}", "put {} in {}")
BOX_VERBS = ("open {}", "close {}")
DEVICE_VERBS = ("turn on {}", "turn off {}")
_COMMON_RULES = {
    "look around": "Shows the room. Changes nothing.",
    "inventory": "Shows what the agent holds. Changes nothing.",
    "examine {}": "Describes a thing. Changes nothing.",
    "take {}": "The thing moves from where it is to the agent, as the last of the things it contains. "
    "It must be moveable (isMoveable), reachable and not held already.",
    "put {} in {}": "The first thing moves from the agent into the second, as the last of its contents. The agent must "
    "hold the first; the second must be reachable, a container (isContainer) and open (isOpen).",
    "open {}": "A container that is openable (isOpenable) and closed becomes open (isOpen = True).",
    "close {}": (
        "A container that is openable and open becomes closed (isOpen = False). What is in a closed container "
        "cannot be reached."
    ),
    "turn on {}": "A thing that is activatable (isActivatable) and off becomes on (isOn = True).",
    "turn off {}": "A thing that is activatable and on becomes off (isOn = False).",
}
_COMMON_CLASSES = {
    "GameObject": (
        "Anything in the game. isContainer: whether it can hold others; isMoveable: whether the agent can take it."
    ),
    "Container": "Holds others while it is open (isOpen); isOpenable says whether that can change. containerPrefix is "
    "how one speaks of it.",
    "Device": "Can be turned on and off (isOn) where it is activatable (isActivatable).",
    "Agent": "The player, a container that is always open. It holds what was taken. No tick.",
}
_WORLD_CLASS = "Object: World\nThe room that everything is in. No tick."


class Game(ABC):
    """The rules of one game. Stateless: every method works on the state it is given."""

    name: ClassVar[str]
    task: ClassVar[str]
    room: ClassVar[str]
    own_verbs: ClassVar[dict[str, str]] = {}  # template -> rule; the method is `do_` and the verb's words
    boxes: ClassVar[bool] = True
    devices: ClassVar[bool] = True
    classes: ClassVar[dict[str, str]]  # class -> properties and tick, in words
    score_rules: ClassVar[str]

    @abstractmethod
    def build(self, s: State, rng: random.Random) -> None:
        """Furnish the room."""

    @abstractmethod
    def tick(self, s: State) -> None:
        """Let time pass once."""

    @abstractmethod
    def points(self, s: State) -> tuple[int, bool, bool]:
        """Score, whether the game is over, whether it is won."""

    @abstractmethod
    def expert(self, s: State) -> str:
        """The next action of a player who knows the rules, things by their labels."""

    def start(self, seed: int) -> State:
        """The start state of this seed."""
        s = State()
        s.add("agent", "Agent", holder())
        s.add(self.room, "World", holder()).contains.append(0)
        self.build(s, random.Random(f"{self.name} {seed}"))
        return s

    def score(self, s: State) -> dict[str, Any]:
        score, over, won = self.points(s)
        return {"score": score, "gameOver": over, "gameWon": won}

    @cached_property
    def verbs(self) -> dict[str, str]:
        """Template -> rule of every action of the game."""
        shared = COMMON + (BOX_VERBS if self.boxes else ()) + (DEVICE_VERBS if self.devices else ())
        return {**{v: _COMMON_RULES[v] for v in shared}, **self.own_verbs}

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Callable[..., str]]]:
        found = []
        for template in self.verbs:
            words = template.replace("{}", "").split()
            method = getattr(self, "do_" + "_".join(words[: 2 if words[0] == "turn" else 1]))
            found.append((re.compile(re.escape(template).replace(r"\{\}", _NAMED.pattern)), method))
        return found

    def act(self, s: State, action: str) -> str:
        """Apply an action and say what happened. An action that is none, or that the rules forbid, changes nothing."""
        for pattern, method in self._patterns:
            found = pattern.fullmatch(action)
            if found is None:
                continue
            labels, uuids = found.groups()[::2], [int(u) for u in found.groups()[1::2]]
            reach = {t.uuid: t for t in s.reachable()}
            things = [reach.get(u) for u in uuids]
            if any(t is None or t.label != label for t, label in zip(things, labels, strict=True)):
                return "You cannot reach that."
            return method(s, *things)
        return "I do not understand that."

    def actions(self, s: State) -> list[str]:
        """Every action that can be worded now, useful or not."""
        names = [t.name for t in s.reachable()]
        return [template.format(*args) for template in self.verbs for args in permutations(names, template.count("{}"))]

    def resolve(self, s: State, words: str) -> str:
        """An action with labels as one with names."""
        labels = {t.label: t.name for t in s.things.values()}
        pattern = "|".join(re.escape(label) for label in sorted(labels, key=len, reverse=True))
        for template in self.verbs:
            found = re.fullmatch(re.escape(template).replace(r"\{\}", f"({pattern})"), words)
            if found is not None:
                return template.format(*(labels[label] for label in found.groups()))
        raise ValueError(f"{self.name}: {words!r} fits no action")

    def snapshot(self, s: State, observation: str, action: str) -> dict[str, Any]:
        """The state as a row holds it."""
        seen = ", ".join(t.name for t in s.inside(s.room) if t is not s.agent)
        held = ", ".join(t.name for t in s.inside(s.agent))
        return {
            "observation": observation,
            "look": f"You are in the {self.room}. You see: {seen}.",
            "inventory": f"You hold: {held}." if held else "You hold nothing.",
            "taskDesc": self.task,
            "lastAction": action,
            "objects": s.objects(),
            "max_UUID": s.next_uuid,
        }

    @property
    def object_rules(self) -> str:
        """Chunks divided by a line of ten "=", the room's chunk last."""
        chunks = [f"Object: {name}\n{text}" for name, text in {**_COMMON_CLASSES, **self.classes}.items()]
        return "\n==========\n".join([*chunks, _WORLD_CLASS])

    @property
    def action_rules(self) -> str:
        return "\n".join(f"{template.format('X', 'Y')}: {rule}" for template, rule in self.verbs.items())

    def fetch(self, s: State, thing: Thing, to: Thing) -> str:
        """The expert's next action on the way of a reachable thing into a container."""
        return f"put {thing.label} in {to.label}" if s.has(thing) else f"take {thing.label}"

    def do_look(self, s: State) -> str:
        return self.snapshot(s, "", "")["look"]

    def do_inventory(self, s: State) -> str:
        return self.snapshot(s, "", "")["inventory"]

    def do_examine(self, s: State, thing: Thing) -> str:
        return f"{thing.name}: {thing.properties}"

    def do_take(self, s: State, thing: Thing) -> str:
        if not thing["isMoveable"] or s.has(thing):
            return "You cannot take that."
        s.move(thing, s.agent)
        return f"You take the {thing.label}."

    def do_put(self, s: State, thing: Thing, target: Thing) -> str:
        if not s.has(thing) or not target["isContainer"] or not target["isOpen"] or s.holds(thing, target):
            return "You cannot do that."
        s.move(thing, target)
        return f"You put the {thing.label} {target['containerPrefix']} the {target.label}."

    def do_open(self, s: State, thing: Thing) -> str:
        if not thing["isOpenable"] or thing["isOpen"]:
            return "It does not open."
        thing["isOpen"] = True
        return f"You open the {thing.label}."

    def do_close(self, s: State, thing: Thing) -> str:
        if not thing["isOpenable"] or not thing["isOpen"]:
            return "It does not close."
        thing["isOpen"] = False
        return f"You close the {thing.label}."

    def do_turn_on(self, s: State, thing: Thing) -> str:
        if not thing["isActivatable"] or thing["isOn"]:
            return "Nothing happens."
        thing["isOn"] = True
        return f"The {thing.label} is on."

    def do_turn_off(self, s: State, thing: Thing) -> str:
        if not thing["isActivatable"] or not thing["isOn"]:
            return "Nothing happens."
        thing["isOn"] = False
        return f"The {thing.label} is off."
