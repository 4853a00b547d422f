"""Games as worlds, and the imagined world: with a perfect model it never leaves the true one, with none it stays at
the start.
"""

import json
import random

import pytest

from terrella.data.trajectory import Invalid
from terrella.rl.text_games.crawl import GAMES, expert_actions
from terrella.rl.text_games.world import ImaginedGame, TextGame, drift, drift_table, true_predictor, view_of
from terrella.rl.worlds.base import WorldFault, attempt

EMPTY = '{"modified": [], "removed": [], "score": {}}'


def copies(rows: list[dict]) -> list[str | Invalid]:
    return [EMPTY for _ in rows]


@pytest.mark.parametrize("name", GAMES)
def test_the_imagined_world_of_a_perfect_model_is_the_true_one(name: str) -> None:
    true, imagined = TextGame(name), ImaginedGame(true_predictor, name)
    assert true.reset(3) == imagined.reset(3)
    for action in expert_actions(GAMES[name], 3):
        a, b = true.step(action), imagined.step(action)
        assert (a.reward, a.done, a.info["success"]) == (b.reward, b.done, b.info["success"])
        assert imagined.view is not None and true.state is not None
        assert imagined.view.key() == view_of(name, true.state).key()
    assert a.done and a.info["success"] == 1.0


@pytest.mark.parametrize("name", GAMES)
def test_what_changes_makes_the_next_state_of_the_one_before(name: str) -> None:
    world = TextGame(name)
    before = world.reset(5)
    for action in ["dance", *expert_actions(GAMES[name], 5)]:
        after = world.step(action).text
        assert world.changed(before, world.change(before, after)) == after
        before = after
    assert world.changed(before, "nothing") is None
    endless = '{"modified": [], "removed": [], "score": {"score": 1e999, "gameOver": false, "gameWon": false}}'
    assert world.changed(before, endless) is None


def test_skill_is_the_share_of_the_experts_actions() -> None:
    for skill, wins in ((0.0, range(5)), (1.0, range(20, 21))):
        world, won = TextGame("feed-fish", skill), 0
        for seed in range(20):
            world.reset(seed)
            coin = random.Random(seed)
            won += any(world.step(world.random_action(coin)).info["success"] for _ in range(6))
        assert won in wins


def test_snapshots_restore_both() -> None:
    for world in (TextGame("mix-colours"), ImaginedGame(true_predictor, "mix-colours")):
        world.reset(1)
        kept = json.loads(json.dumps(world.snapshot()))
        actions = expert_actions(GAMES["mix-colours"], 1)
        first = [world.step(a).text for a in actions]
        world.restore(kept)
        assert [world.step(a).text for a in actions] == first
        with pytest.raises(WorldFault, match="snapshot"):
            world.restore({**kept, "game": "bake-loaf"})


def test_faults_and_bad_answers() -> None:
    assert isinstance(attempt(TextGame().step, "take x"), Invalid)
    gone = ImaginedGame(lambda rows: [Invalid("no server")] * len(rows))
    gone.reset(0)
    assert "no server" in attempt(gone.step, "look around").reason
    for answer in (
        "rubbish",
        '{"modified": [{"uuid": 1}], "removed": []}',
        '{"modified": [], "removed": [], "score": {"score": 1}}',
        "{" * 9999,
    ):
        world = ImaginedGame(lambda rows, answer=answer: [answer])
        before = world.reset(0)
        result = world.step("look around")
        assert result.text == before and result.info["readable"] == 0.0
    nothing = TextGame("weigh-stones")
    before = nothing.reset(0)
    told = nothing.step("dance")
    assert told.text == before and told.info == {"success": 0.0, "action_is_valid": 0.0, "action_is_effective": 0.0}


def test_drift_of_the_truth_and_of_copying() -> None:
    games = ["fill-bucket", "charge-torch", "grow-tomato"]
    perfect = drift(games, 12, 10, true_predictor)
    assert all(all(hits) for hits in perfect["model"]) and len(perfect["model"]) == 10
    lazy = drift(games, 12, 10, copies)
    assert lazy["model"] == lazy["copy"] == perfect["copy"]
    assert sum(lazy["copy"][0]) > sum(lazy["copy"][6]) and not any(lazy["copy"][6])
    told = drift_table({"m": lazy["model"], "copy": lazy["copy"]}, "Drift")
    assert [line["kind"] for line in told["rows"]] == ["baseline", "model", "ceiling"] and len(told["columns"]) == 10
    assert told["rows"][0]["cells"][0]["n"] == 12
