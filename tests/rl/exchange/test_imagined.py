"""A model's world beside the true one: agreement is reported step by step, and a snapshot keeps both."""

import json
import random

from terrella.data.trajectory import Invalid
from terrella.rl.exchange.imagined import ComparedWorld, ImaginedGrid
from terrella.rl.exchange.named_worlds import NamedWorld, Play, find_world
from terrella.rl.grid.imagination import GridDynamics
from terrella.rl.text_games.evaluate import copy_answers
from terrella.rl.text_games.world import ImaginedGame, TextGame, true_predictor

GAME = "mix-colours"


def game(predict) -> NamedWorld:
    return NamedWorld("imagined", lambda: ComparedWorld(ImaginedGame(predict, GAME), TextGame(GAME)), "", 20)


def test_a_right_model_stays_exact_and_a_copying_one_drifts() -> None:
    right, copying, true = Play(game(true_predictor)), Play(game(copy_answers)), Play(find_world(f"text-game/{GAME}"))
    rng, agreed = random.Random(0), []
    assert right.reset(3).text == copying.reset(3).text == true.reset(3).text
    for step in range(1, 9):
        action = true.random_action(rng)
        truth = true.step(action)
        seen, copied = right.step(action), copying.step(action)
        assert (
            seen.info["exact"] == 1.0 and seen.info["exact_steps"] == step and seen.info["true_reward"] == truth.reward
        )
        assert (seen.reward, seen.terminated) == (truth.reward, truth.terminated)
        agreed.append(copied.info["exact"])
        assert copied.info["exact_steps"] == (agreed.index(0.0) if 0.0 in agreed else step)
        if truth.done:
            break
    assert 0.0 in agreed  # something changed, and the copy did not


def test_sokoban_imagined_cell_by_cell() -> None:
    true, dynamics = find_world("SimpleSokoban"), GridDynamics.of("SimpleSokoban")
    answers = [dynamics.next, lambda state, action: "?" * len(state), lambda state, action: Invalid("no sampler")]
    right, broken, failing = (
        Play(
            NamedWorld(
                "imagined",
                lambda answer=answer: ComparedWorld(ImaginedGrid(true.make(), dynamics, answer), true.make()),
                "",
                9,
            )
        )
        for answer in answers
    )
    native = Play(true)
    for play in (right, broken, failing, native):
        play.reset(5)
    for word in ("Up", "Left", "Down", "Right", "Up"):
        expected, seen = native.step(word), right.step(word)
        assert (seen.text, seen.reward, seen.terminated) == (expected.text, expected.reward, expected.terminated)
        assert seen.info["exact"] == 1.0
        assert broken.step(word).info["readable"] == 0.0
    kept = json.loads(json.dumps(right.snapshot()))
    after = right.step("Down")
    right.restore(kept)
    assert right.step("Down") == after
    try:
        failing.step("Up")
    except RuntimeError as error:
        assert "no sampler" in str(error)
    else:
        raise AssertionError("a model that gives nothing is a fault, not a state")
