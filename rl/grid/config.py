"""Settings of a grid's world model as an environment. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, kw_only=True)
class GridEnvironment:
    """A world model of a grid: a state and an action in, the next state out. It imagines states for actions that are
    given, each from its own last one."""

    kind: Literal["grid"]
    tag: str  # a Sokoban world of rl/worlds/tags.yaml
    # the collect stage that makes the rooms, as many to learn from as its prompts, and plays in them at random
    data: str
    heldout_rooms: int  # rooms never seen in training
    actions_per_room: int  # random actions recorded in each room
    first_seed: int = 10_000  # of the rooms
    steps: int = 4  # states to imagine
    walk: int = 8  # random actions before the start state, at most
    fixed_length: ClassVar[bool] = True  # a state has one token a cell
    tasks: ClassVar[str] = "grid.tasks:GridTasks"
    making: ClassVar[tuple[str, ...]] = ("tag", "heldout_rooms", "actions_per_room", "first_seed")

    def __post_init__(self) -> None:
        if min(self.heldout_rooms, self.actions_per_room, self.steps) < 1 or self.walk < 0:
            raise ValueError("heldout_rooms: at least 1, as are actions_per_room and steps; walk is 0 or more")
