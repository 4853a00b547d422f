"""The rooms of a grid's world model, and random play in them, as a collect stage leaves both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ...core.files import make_folder, read_json, write_json
from ...core.progress import Progress
from ...core.rng import fold, uniform
from ...data.schema import TRANSITION
from ...data.shards import ShardSet, ShardWriter
from ..language_tasks import Made
from .config import GridEnvironment
from .imagination import GridDynamics

ROOMS, SHARDS = "rooms.json", "shards"
GUARD_EVERY = 4096  # transitions


def layout(state: str) -> str:
    """Walls and targets of a state: what two rooms must differ in to count as different."""
    return state.translate(str.maketrans("PXS√", "__OO"))


def make_rooms(dynamics: GridDynamics, count: int, heldout: int, first_seed: int) -> dict[str, list[str]]:
    """Training rooms, and held-out rooms whose layout occurs in no training room."""
    progress = Progress("rooms", count + heldout)
    made: list[str] = []
    seed = first_seed
    seen: set[str] = set()
    while len(made) < count + heldout:
        state = dynamics.start(seed)
        seed += 1
        if len(made) < count:
            seen.add(layout(state))
        elif layout(state) in seen:
            continue
        made.append(state)
        progress.update(len(made))
    return {"train": made[:count], "heldout": made[count:]}


def transitions(
    dynamics: GridDynamics, rooms: Sequence[str], actions_per_room: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Uniform random play in every room, until it is solved or the actions are used up."""
    for index, state in enumerate(rooms):
        key = fold(seed, index)
        for step in range(actions_per_room):
            action = 1 + int(uniform(key, step) * 4)
            after = dynamics.next(state, action)
            yield {"schema": TRANSITION, "state": state, "action": action, "next_state": after}
            if "X" not in after:
                break
            state = after


def make_data(
    settings: GridEnvironment, dynamics: GridDynamics, made: Made, guard: Callable[[], None]
) -> dict[str, int]:
    """Write rooms and shards of transitions; a killed stage goes on after its last whole shard."""
    make_folder(made.folder)
    rooms = read_json(made.folder / ROOMS)
    if rooms is None:
        guard()
        rooms = make_rooms(dynamics, made.settings["prompts"], settings.heldout_rooms, settings.first_seed)
        write_json(made.folder / ROOMS, rooms)
    folder, each = made.folder / SHARDS, made.settings["samples_per_shard"]
    progress = Progress("random play", len(rooms["train"]) * settings.actions_per_room)
    with ShardWriter(folder, kind=TRANSITION, max_samples=each, resume=folder.exists()) as writer:
        samples = transitions(dynamics, rooms["train"], settings.actions_per_room, made.seed)
        for sample in islice(samples, writer.samples, None):
            if writer.samples % GUARD_EVERY == 0:
                guard()
            writer.write({"transition.json": sample})
            progress.update(writer.samples)
    return {"rooms": len(rooms["train"]), "heldout_rooms": len(rooms["heldout"]), "transitions": writer.samples}


class Transitions(Sequence[dict[str, Any]]):
    """The transitions of a folder of shards, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.shards = ShardSet(folder)

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.shards[index]["transition.json"]
