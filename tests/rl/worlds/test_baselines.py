"""Random policy and ceilings on the 128 validation seeds, against the published anchors and exact values."""

import json
import os
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from terrella.rl.worlds.baselines import VALIDATION_SEEDS, ceiling, pass_at_k, random_policy, random_successes
from terrella.rl.worlds.frozen_lake import FrozenLake, FrozenLakeConfig, make_map, success_within
from terrella.rl.worlds.sokoban import RoomConfig, make_room, shortest_solution
from terrella.rl.worlds.tasks import load_tasks

TASKS = load_tasks()


def test_pass_at_k_is_the_share_of_subsets_with_a_success() -> None:
    for n, c, k in [(5, 2, 3), (6, 0, 2), (6, 6, 1), (7, 1, 7)]:
        subsets = list(combinations([i < c for i in range(n)], k))
        assert pass_at_k(c, n, k) == pytest.approx(np.mean([any(s) for s in subsets]))
    with pytest.raises(ValueError, match="k:"):
        pass_at_k(1, 4, 5)


@pytest.mark.parametrize(("tag", "one", "eight"), [("SimpleSokoban", 0.195, 0.502), ("FrozenLake", 0.203, 0.61)])
def test_random_policy_matches_the_anchors(tag: str, one: float, eight: float) -> None:
    found = random_policy(TASKS[tag], VALIDATION_SEEDS, 100)
    assert found[1].value == pytest.approx(one, abs=0.01) and found[8].value == pytest.approx(eight, abs=0.02)
    assert found[1].n == 128 and found[1].low < one < found[1].high


def test_frozen_lake_random_policy_is_the_exact_value() -> None:
    maps = [make_map(FrozenLakeConfig(), s) for s in VALIDATION_SEEDS]
    exact = np.mean([success_within(rows, 1 / 3, 10, "uniform") for rows in maps])
    measured = random_successes(TASKS["FrozenLake"], VALIDATION_SEEDS, 400, seed=1).mean() / 400
    assert measured == pytest.approx(exact, abs=4 * np.sqrt(0.2 * 0.8 / (128 * 400)))


def test_frozen_lake_ceilings() -> None:
    maps = [make_map(FrozenLakeConfig(), s) for s in VALIDATION_SEEDS]
    for rate, expected in [(1 / 3, 0.466), (0.8, 0.876), (1.0, 1.0)]:
        assert np.mean([success_within(rows, rate, 10) for rows in maps]) == pytest.approx(expected, abs=6e-4)
    assert ceiling(TASKS["FrozenLake"], VALIDATION_SEEDS) == pytest.approx(0.466, abs=6e-4)
    assert ceiling(TASKS["FrozenLake6x6"], VALIDATION_SEEDS) == pytest.approx(0.229, abs=6e-4)


def test_the_world_itself_reaches_the_dynamic_programme() -> None:
    """A policy that is optimal for one map wins as often in the world, over samples, as the recursion says."""
    rows = make_map(FrozenLakeConfig(), 123)
    wins = 0
    for sample in range(800):
        world = FrozenLake()
        world.reset(123, sample)
        for left in range(10, 0, -1):
            values = []
            for action in (1, 2, 3, 4):
                cells = [world.table_SD[world.cell, (action - 1 + turn) % 4] for turn in (-1, 0, 1)]
                values.append(np.mean([_value(rows, int(cell), left - 1) for cell in cells]))
            result = world.step(1 + int(np.argmax(values)))
            if result.done:
                wins += result.info["success"]
                break
    assert wins / 800 == pytest.approx(success_within(rows, 1 / 3, 10), abs=4 * np.sqrt(0.25 / 800))


_CACHE: dict[tuple[int, int], float] = {}


def _value(rows: tuple[str, ...], cell: int, left: int) -> float:
    flat = "".join(rows)
    if flat[cell] in "HG":
        return float(flat[cell] == "G")
    if (cell, left) not in _CACHE:
        moved = flat.replace("S", "F")
        moved = moved[:cell] + "S" + moved[cell + 1 :]
        size = len(rows)
        _CACHE[cell, left] = success_within(
            tuple(moved[i : i + size] for i in range(0, size * size, size)), 1 / 3, left
        )
    return _CACHE[cell, left]


def test_every_simple_room_is_solvable_and_the_share_of_harder_ones_is_known() -> None:
    assert ceiling(TASKS["SimpleSokoban"], VALIDATION_SEEDS) == 1.0
    root = os.environ.get("TERRELLA_SHARED_DATA")
    if root:
        rows = json.loads((Path(root) / "spa" / "sokoban_simple.json").read_text())["SimpleSokoban_val"]
        assert [len(shortest_solution(make_room(RoomConfig(), r["seed"])[0]) or ()) for r in rows] == [
            r["optimal_actions"] for r in rows
        ]
    lengths = [len(shortest_solution(make_room(RoomConfig(), s)[0]) or ()) for s in VALIDATION_SEEDS]
    assert np.mean(lengths) == pytest.approx(3.87, abs=0.005)
    assert [lengths.count(i) for i in range(1, 11)] == [13, 30, 15, 28, 19, 9, 2, 8, 2, 2]
