"""Self-play: a random policy walks through rooms; its transitions become WebDataset shards, held-out rooms a list."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ...core.files import make_folder, read_json, write_json
from ...core.progress import Progress
from ...core.rng import fold, uniform
from ...data.schema import TRANSITION
from ...data.shards import ShardWriter
from ...rl.imagination import GridDynamics
from ..job import Job
from ..settings.grid import SelfPlay
from .grid import dynamics_of

ROOMS = "rooms.json"
SHARDS = "shards"


def run(stage: SelfPlay, job: Job) -> dict:
    """Write rooms and shards; a killed stage goes on after its last whole shard."""
    folder = job.stage_folder(stage.name)
    if job.mesh.is_main:
        make_folder(folder)
        rooms = read_json(folder / ROOMS)
        if rooms is None:
            job.run.guard()
            rooms = make_rooms(stage, dynamics_of(job))
            write_json(folder / ROOMS, rooms)
        samples = write_transitions(stage, job, rooms["train"])
    job.mesh.barrier()
    return {"rooms": stage.rooms, "heldout_rooms": stage.heldout_rooms, "transitions": samples} if job.mesh.is_main else {}


def layout(state: str) -> str:
    """Walls and targets of a state: what two rooms must differ in to count as different."""
    return state.translate(str.maketrans("PXS√", "__OO"))


def make_rooms(stage: SelfPlay, dynamics: GridDynamics) -> dict[str, list[str]]:
    """Training rooms, and held-out rooms whose layout occurs in no training room."""
    total = stage.rooms + stage.heldout_rooms
    progress = Progress("rooms", total)
    made: list[str] = []
    seed = stage.first_seed
    seen: set[str] = set()
    while len(made) < total:
        state = dynamics.start(seed)
        seed += 1
        if len(made) < stage.rooms:
            seen.add(layout(state))
        elif layout(state) in seen:
            continue
        made.append(state)
        progress.update(len(made))
    return {"train": made[: stage.rooms], "heldout": made[stage.rooms :]}


def transitions(stage: SelfPlay, dynamics: GridDynamics, rooms: list[str], seed: int) -> Iterator[dict]:
    """Uniform random play in every room, until it is solved or the actions are used up."""
    for index, state in enumerate(rooms):
        key = fold(seed, index)
        for step in range(stage.actions_per_room):
            action = 1 + int(uniform(key, step) * 4)
            after = dynamics.next(state, action)
            yield {"schema": TRANSITION, "state": state, "action": action, "next_state": after}
            if "X" not in after:
                break
            state = after


def write_transitions(stage: SelfPlay, job: Job, rooms: list[str]) -> int:
    """Shards of all transitions; what whole shards hold already is not written again."""
    folder = job.stage_folder(stage.name) / SHARDS
    progress = Progress("self-play transitions", stage.rooms * stage.actions_per_room)
    with ShardWriter(folder, kind=TRANSITION, max_samples=stage.samples_per_shard, resume=folder.exists()) as writer:
        for sample in islice(transitions(stage, dynamics_of(job), rooms, job.recipe.seed), writer.samples, None):
            job.run.guard() if writer.samples % 4096 == 0 else None
            writer.write({"transition.json": sample})
            progress.update(writer.samples)
    return writer.samples
