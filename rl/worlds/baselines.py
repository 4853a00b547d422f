"""What a score must be read beside: the random policy and the ceiling, on the same seeds and the same action budget."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import comb

import numpy as np

from ..statistics import Estimate, mean_share
from .frozen_lake import FrozenLake, make_map, success_within, transitions
from .sokoban import BOX, PLAYER, Sokoban, shortest_solution, step_batch
from .sokoban_rooms import make_room, make_rooms
from .tasks import Task

VALIDATION_SEEDS = range(123, 251)


def pass_at_k(successes: int, samples: int, k: int) -> float:
    """The chance that k of the samples, drawn without replacement, hold a success: unbiased for any k up to
    `samples`.
    """
    if not 0 <= successes <= samples or not 1 <= k <= samples:
        raise ValueError(f"k: need 0 <= successes <= samples and 1 <= k <= samples, not {successes}, {samples}, {k}")
    return 1.0 - comb(samples - successes, k) / comb(samples, k)


def _sokoban(world: Sokoban, seeds: Sequence[int], rollouts: int, actions: int, rng: np.random.Generator) -> np.ndarray:
    cells_BC = np.repeat(make_rooms(world.config, list(seeds)), rollouts, axis=0)
    player_B = (cells_BC >= PLAYER).argmax(1)
    won_B = np.zeros(len(cells_BC), dtype=bool)
    for _ in range(actions):
        step_batch(cells_BC, player_B, rng.integers(1, 5, size=len(cells_BC)), world.config.width)
        won_B |= ~(cells_BC == BOX).any(1)
    return won_B.reshape(len(seeds), rollouts).sum(1)


def _frozen_lake(
    world: FrozenLake, seeds: Sequence[int], rollouts: int, actions: int, rng: np.random.Generator
) -> np.ndarray:
    maps = [make_map(world.config, seed) for seed in seeds]
    table_RSD = np.stack([transitions(rows) for rows in maps])
    map_B = np.repeat(np.arange(len(maps)), rollouts)
    cell_B = np.repeat([("".join(rows)).index("S") for rows in maps], rollouts)
    goal_B = np.repeat([("".join(rows)).index("G") for rows in maps], rollouts)
    # A uniform direction stays uniform whatever the slip, so the slip needs no draw of its own.
    for _ in range(actions):
        cell_B = table_RSD[map_B, cell_B, rng.integers(4, size=len(cell_B))]
    return (cell_B == goal_B).reshape(len(seeds), rollouts).sum(1)


def random_successes(task: Task, seeds: Sequence[int], rollouts: int, seed: int = 0) -> np.ndarray:
    """How many of `rollouts` episodes of random actions (uniform words, or the world's own random texts) succeed,
    for each seed.
    """
    world, rng = task.make(), np.random.default_rng(seed)
    if isinstance(world, Sokoban):
        return _sokoban(world, seeds, rollouts, task.max_actions, rng)
    if isinstance(world, FrozenLake):
        return _frozen_lake(world, seeds, rollouts, task.max_actions, rng)
    wins = np.zeros(len(seeds), dtype=np.int64)
    for row, instance in enumerate(seeds):
        for sample in range(rollouts):
            world.reset(instance, sample)
            chooser = random.Random(f"{seed}/{instance}/{sample}")
            for _ in range(task.max_actions):
                action = world.parse_action(world.random_action(chooser))
                assert action is not None
                result = world.step(action)
                if result.done:
                    wins[row] += bool(result.info["success"])
                    break
    return wins


def random_policy(
    task: Task, seeds: Sequence[int], rollouts: int, ks: Sequence[int] = (1, 8), seed: int = 0
) -> dict[int, Estimate]:
    """Pass@k of uniform action words: the mean over the seeds, with the interval that drawing other seeds would
    leave.
    """
    wins = random_successes(task, seeds, rollouts, seed)
    return {k: mean_share([pass_at_k(int(w), rollouts, k) for w in wins]) for k in ks}


def ceiling(task: Task, seeds: Sequence[int]) -> float | None:
    """The success rate no policy can pass within the action budget: shortest solutions for Sokoban, dynamic programming
    for FrozenLake.

    None where no ceiling is computed. With coupled slips the map betrays them, and this ceiling holds for policies that
    do not look.
    """
    world = task.make()
    if isinstance(world, Sokoban):
        rooms = [make_room(world.config, s)[0] for s in seeds]
        return float(
            np.mean([shortest_solution(room, world.config.width, task.max_actions) is not None for room in rooms])
        )
    if isinstance(world, FrozenLake):
        rate = world.config.success_rate
        return float(np.mean([success_within(make_map(world.config, s), rate, task.max_actions) for s in seeds]))
    return None
