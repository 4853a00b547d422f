"""World speed on one core: vectorised and single steps, room generation, search; rivals in the same run where they are installed.

Rates are per CPU second of the one thread that runs, so that a busy machine does not change them. Rooms and maps come from a pool:
generation is measured apart.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from terrella.rl.worlds.baselines import VALIDATION_SEEDS, ceiling, random_policy
from terrella.rl.worlds.frozen_lake import BatchFrozenLake, FrozenLakeConfig, make_map
from terrella.rl.worlds.sokoban import BatchSokoban, RoomConfig, make_room, make_rooms
from terrella.rl.worlds.sudoku import SudokuConfig, make_puzzle
from terrella.rl.worlds.tasks import load_tasks

POOL = range(10_000, 10_512)


@dataclass(frozen=True)
class Row:
    """One measurement: the median over repeats with its 20th and 80th percentile."""

    bench: str
    case: str
    impl: str
    metric: str
    value: float
    p20: float
    p80: float
    unit: str


def _measure(run: Callable[[], int], repeats: int) -> list[float]:
    """Things done per CPU second, once per repeat; the first run only warms up."""
    rates = []
    for repeat in range(repeats + 1):
        start = time.process_time()
        count = run()
        spent = time.process_time() - start
        if repeat:
            rates.append(count / spent)
    return rates


def _row(case: str, impl: str, metric: str, samples: list[float], unit: str) -> Row:
    p20, median, p80 = np.percentile(samples, [20, 50, 80])
    return Row("worlds", case, impl, metric, float(median), float(p20), float(p80), unit)


def steps(repeats: int) -> Iterator[Row]:
    """Steps per second: batches, then one world at a time."""
    rng = np.random.default_rng(0)
    maps = [make_map(FrozenLakeConfig(), seed) for seed in POOL]
    batches = {
        "sokoban 6x6 1 box": lambda size: BatchSokoban(make_rooms(RoomConfig(), POOL), size, 6, 10, rng),
        "sokoban 10x10 2 boxes": lambda size: BatchSokoban(make_rooms(RoomConfig(10, 10, 2, 300), POOL[:64]), size, 10, 10, rng),
        "frozen_lake 4x4": lambda size: BatchFrozenLake(maps, size, 1 / 3, 10, rng),
    }
    for case, make in batches.items():
        for size in (64, 1024, 8192):
            batch = make(size)
            actions = rng.integers(1, 5, size=(max(20, 400_000 // size), size), dtype=np.int8)

            def run(batch: BatchSokoban | BatchFrozenLake = batch, actions: np.ndarray = actions) -> int:
                for action_B in actions:
                    batch.step(action_B)
                return actions.size

            yield _row(case, f"batch {size}", "steps", _measure(run, repeats), "1/s")
    for tag in ("SimpleSokoban", "FrozenLake"):
        world, choices = load_tasks()[tag].make(), random.Random(0).choices((1, 2, 3, 4), k=3000)
        world.reset(123)
        start = world.snapshot()

        def single(world=world, start=start, choices=choices) -> int:
            for action in choices:
                if world.step(action).done:
                    world.restore(start)
            return len(choices)

        yield _row(tag, "single world", "steps", _measure(single, repeats), "1/s")


def generation(repeats: int) -> Iterator[Row]:
    """Milliseconds for one instance."""
    cases: dict[str, tuple[Callable[[int], object], int]] = {
        "sokoban 6x6 1 box": (lambda s: make_room(RoomConfig(), s), 200),
        "sokoban 6x6 2 boxes": (lambda s: make_room(RoomConfig(boxes=2, search_depth=30), s), 100),
        "sokoban 8x8 2 boxes": (lambda s: make_room(RoomConfig(8, 8, 2, 10), s), 100),
        "sokoban 10x10 2 boxes": (lambda s: make_room(RoomConfig(10, 10, 2, 300), s), 48),
        "frozen_lake 4x4": (lambda s: make_map(FrozenLakeConfig(), s), 200),
        "sudoku 4x4": (lambda s: make_puzzle(SudokuConfig(), s), 200),
    }
    for case, (make, count) in cases.items():

        def run(make: Callable[[int], object] = make, count: int = count) -> int:
            for seed in range(123, 123 + count):
                make(seed)
            return count

        yield _row(case, "generator", "generation", [1e3 / rate for rate in _measure(run, repeats)], "ms")
    shop = load_tasks()["WebShop"].make()
    shop.reset(0)

    def search() -> int:
        for goal in shop.goals[:100]:
            shop.index.search(goal.instruction)
        return 100

    yield _row("webshop 200 products", "bm25", "search", [1e3 / rate for rate in _measure(search, repeats)], "ms")


def rivals(repeats: int) -> Iterator[Row]:
    """The public environments, stepped the way their users do."""
    if importlib.util.find_spec("gymnasium"):
        import gymnasium

        lake = gymnasium.make_vec("FrozenLake-v1", num_envs=64, vectorization_mode="sync")
        lake.reset(seed=0)
        actions = np.random.default_rng(0).integers(0, 4, size=(100, 64))

        def run() -> int:
            for action_B in actions:
                lake.step(action_B)
            return actions.size

        yield _row("frozen_lake 4x4", f"gymnasium {gymnasium.__version__} sync 64", "steps", _measure(run, repeats), "1/s")
    if importlib.util.find_spec("gym_sokoban"):
        from gym_sokoban.envs.sokoban_env import SokobanEnv

        game = SokobanEnv(dim_room=(6, 6), max_steps=10_000, num_boxes=1, reset=False)
        random.seed(0)
        np.random.seed(0)
        game.reset()

        def push() -> int:
            for action in random.Random(0).choices((1, 2, 3, 4), k=1000):
                game.step(action, observation_mode="tiny_rgb_array")
            return 1000

        yield _row("sokoban 6x6 1 box", "gym_sokoban 0.0.6", "steps", _measure(push, repeats), "1/s")


def scores() -> Iterator[Row]:
    """The random policy and the ceiling on the 128 validation seeds, 100 rollouts each, over five seeds of the policy."""
    for tag in ("SimpleSokoban", "FrozenLake"):
        task = load_tasks()[tag]
        found = [random_policy(task, VALIDATION_SEEDS, 100, seed=seed) for seed in range(5)]
        for k in (1, 8):
            yield _row(tag, "random policy", f"pass@{k}", [100 * f[k].value for f in found], "%")
        top = 100 * (ceiling(task, VALIDATION_SEEDS) or 0.0)
        yield _row(tag, "ceiling", "pass@1", [top], "%")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    settings = parser.parse_args()
    rows = [*steps(settings.repeats), *generation(settings.repeats), *rivals(settings.repeats), *scores()]
    for row in rows:
        print(f"{row.case:24} {row.impl:28} {row.metric:10} {row.value:14.4g} {row.unit:4} [{row.p20:.4g}, {row.p80:.4g}]")


if __name__ == "__main__":
    main()
