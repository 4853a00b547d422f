"""Parity with the public generators, from shipped digests; the digests themselves are checked where the data is at
hand.
"""

import json
import os
from pathlib import Path

import pytest

from terrella.rl.worlds.frozen_lake import FrozenLake
from terrella.rl.worlds.sokoban import Sokoban
from terrella.rl.worlds.tasks import load_tasks
from terrella.tests.rl.worlds.golden import SHIPPED, from_data, text_digest, trace_digest

DIGESTS = json.loads(SHIPPED.read_text())
SIZES = {"SimpleSokoban": 160, "Sokoban2Boxes": 64, "HarderSokoban": 48, "FrozenLake": 160, "Sudoku": 160}


@pytest.mark.parametrize("tag", SIZES)
def test_instances_have_the_public_text(tag: str) -> None:
    world = load_tasks()[tag].make()
    mode = "text_with_coordinates" if tag == "Sudoku" else "text"
    assert len(DIGESTS[tag]) == SIZES[tag]
    for seed, digest in DIGESTS[tag].items():
        world.reset(int(seed))
        assert text_digest(world.render(mode)) == digest, seed


@pytest.mark.parametrize(
    ("name", "world", "episodes"), [("SimpleSokoban", Sokoban(), 64), ("FrozenLake", FrozenLake(coupled=True), 32)]
)
def test_steps_have_the_public_texts_rewards_and_ends(name: str, world: Sokoban | FrozenLake, episodes: int) -> None:
    rows = DIGESTS[f"{name}/steps"]
    assert len(rows) == episodes
    for seed, actions, digest in rows:
        world.reset(seed)
        results = [world.step(world.parse_action(action)) for action in actions]
        assert trace_digest([(r.text, r.reward, r.done, r.info["action_is_effective"]) for r in results]) == digest, (
            seed
        )


def test_shipped_digests_are_those_of_the_data() -> None:
    root = os.environ.get("TERRELLA_SHARED_DATA")
    if not root:
        pytest.skip("set TERRELLA_SHARED_DATA to the folder that holds spa/ to re-derive the digests from the data")
    assert from_data(Path(root)) == DIGESTS
