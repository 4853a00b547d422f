"""Offered worlds: seeds repeat, a snapshot goes back exactly through JSON, what is no action costs one; no torch is
needed.
"""

import json
import random
import subprocess
import sys

import pytest

from terrella.core.errors import ConfigError
from terrella.rl.exchange.named_worlds import Play, find_world
from terrella.rl.worlds.base import WorldFault

SOME = ["SimpleSokoban", "FrozenLake", "Sudoku", "Countdown", "MetamathQA", "Bandit", "WebShop", "text-game/brew-tea"]


def walk(play: Play, steps: int, rng: random.Random) -> list[tuple]:
    seen = []
    for _ in range(steps):
        if not play.last.done:
            turn = play.step(play.random_action(rng))
            seen.append((turn.text, turn.reward, turn.terminated, turn.truncated))
    return seen


@pytest.mark.parametrize("name", SOME)
def test_seeds_repeat_and_a_snapshot_goes_back(name: str) -> None:
    one, other = Play(find_world(name)), Play(find_world(name))
    assert one.reset(7).text == other.reset(7).text
    assert walk(one, 2, random.Random(1)) == walk(other, 2, random.Random(1))
    kept = json.loads(json.dumps(one.snapshot()))
    if not one.last.done:
        after = walk(one, 3, random.Random(2))
        fresh = Play(find_world(name))
        assert fresh.restore(kept).text == other.last.text
        assert walk(fresh, 3, random.Random(2)) == after


def test_what_is_no_action_costs_one_and_the_actions_end() -> None:
    play = Play(find_world("SimpleSokoban"))
    start = play.reset(0)
    turns = [play.step("jump") for _ in range(play.named.max_actions)]
    assert turns[0].text == start.text and turns[0].info["action_is_valid"] == 0.0 and not turns[0].done
    assert turns[-1].truncated and not turns[-1].terminated
    with pytest.raises(WorldFault, match="reset"):
        play.step("Up")


def test_unknown_names_and_foreign_snapshots_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'SimpleSokoban'"):
        find_world("SimpleSokobann")
    play = Play(find_world("SimpleSokoban"))
    play.reset(0)
    with pytest.raises(WorldFault, match="FrozenLake"):
        play.restore({"name": "FrozenLake"})
    with pytest.raises(WorldFault, match="damaged"):
        play.restore({**play.snapshot(), "last": {}})


def test_worlds_need_no_torch() -> None:
    code = (
        "import sys; from terrella.rl.exchange.named_worlds import *; Play(find_world('Countdown')).reset(1); "
        "print('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300).stdout.strip()
        == "False"
    )
