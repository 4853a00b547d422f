"""What an agent gains from training in a world model: nothing in a copy, much in the true games, and a model that is
wrong about scores costs it.
"""

import math

import pytest

from terrella.data.trajectory import Invalid
from terrella.rl.statistics import mean
from terrella.rl.text_games import training
from terrella.rl.text_games.evaluate import copy_answers
from terrella.rl.text_games.ranking import policy_scores
from terrella.rl.text_games.training import Agent, Decision, facts_of, training_gain
from terrella.rl.text_games.world import ImaginedGame, View, true_predictor
from terrella.rl.worlds.base import WorldFault

GAME = ["weigh-stones"]


def test_the_true_game_is_worth_training_in_and_a_copy_is_not() -> None:
    true = training_gain(GAME, 6, 48, 8, true_predictor)
    assert mean(true.gains).low > 0.0, mean(true.gains)
    copy = training_gain(GAME, 1, 16, 8, copy_answers)
    assert copy.gains == [0.0] * 16  # every episode scores alike, so nothing is learnt
    again = training_gain(GAME, 1, 4, 8, true_predictor)
    assert again == training_gain(GAME, 1, 4, 8, true_predictor)


def test_a_model_that_praises_the_wrong_thing_costs() -> None:
    def praising(rows: list) -> list:
        """Nothing changes, but looking at things scores."""
        looks = [row["tick_state"]["lastAction"].startswith("examine") for row in rows]
        scores = [dict(row["current_score_state"]) for row in rows]
        for score, look in zip(scores, looks):
            score["score"] += look
        return [repr({"modified": [], "removed": [], "score": score}) for score in scores]

    praised = training_gain(GAME, 3, 32, 8, praising)
    assert mean(praised.gains).high < 0.0, mean(praised.gains)


def test_one_step_moves_the_chance_of_what_was_chosen() -> None:
    agent, view = (
        Agent(),
        View([{"name": "cup (ID: 3)", "properties": {"full": False}, "contains": ["tea (ID: 4)"]}], {}, 5),
    )
    facts = facts_of("g", view)
    assert facts == ["g", "g: cup full False", "g: cup has tea"]
    agent.learn(Decision(facts, ["drink (ID: 3)", "wait"], [0.5, 0.5], 0), 1.0)
    # three facts share a step of 1 x (1 - 0.5) for the chosen one, and of 1 x (0 - 0.5) for the other
    assert agent.weights["g", "drink"] == pytest.approx(0.5 / 3) and agent.weights["g", "wait"] == pytest.approx(
        -0.5 / 3
    )
    chances = agent.decide("g", view, ["drink (ID: 9)", "wait"], training.random.Random(0)).chances
    assert chances[0] == pytest.approx(0.7310586)  # of logits 0.5 and -0.5


@pytest.mark.parametrize("score", ["NaN", "Infinity", "-1e999", "1" + "0" * 399, "1e200", '"high"', "[]"])
def test_a_score_that_no_game_gives_counts_as_none(score: str) -> None:
    """A model may write anything for a number; what is measured of it stays finite."""
    answer = f'{{"modified": [], "removed": [], "score": {{"score": {score}, "gameOver": false, "gameWon": false}}}}'
    found = policy_scores(GAME, 2, 3, lambda rows: [answer] * len(rows))
    assert found.imagined == [0.0] * 5 and found.gains == [0.0] * 2
    mixed = training_gain(GAME, 1, 2, 3, lambda rows: [answer, *true_predictor(rows[1:])])
    assert all(math.isfinite(gain) for gain in mixed.gains)
    game = ImaginedGame(lambda rows: [answer] * len(rows), GAME[0])
    game.reset(0)
    assert game.step("look around").reward == 0.0


def test_a_model_that_gives_nothing_is_a_fault() -> None:
    with pytest.raises(WorldFault, match="gone"):
        training_gain(GAME, 1, 4, 4, lambda rows: [Invalid("gone")] * len(rows))
