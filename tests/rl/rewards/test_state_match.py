"""State scores: exact, partial, wrong shape; the copy baseline; the bonus only with the right format."""

import pytest

from terrella.rl.agents.format import parse
from terrella.rl.rewards.state_match import cell_accuracy, state_score, thing_f1, world_model_bonus
from terrella.rl.worlds.sokoban import Sokoban, next_text

BEFORE = "######\n#_P__#\n#_X__#\n#____#\n#_O__#\n######"
AFTER = next_text(BEFORE, 2)


def test_scores_by_hand() -> None:
    assert (
        state_score(AFTER, AFTER)
        == state_score(f" {AFTER} \n".strip(), AFTER)
        == cell_accuracy(AFTER, AFTER)
        == thing_f1(AFTER, AFTER)
        == 1.0
    )
    # Three cells differ: player's old and new place, the box's new one. Of the three things only the target stays.
    assert cell_accuracy(BEFORE, AFTER) == pytest.approx(33 / 36) and thing_f1(BEFORE, AFTER) == pytest.approx(2 / 6)
    assert state_score(BEFORE, AFTER) == pytest.approx(1 / 6)  # the copy baseline
    assert (
        state_score(None, AFTER)
        == state_score("", AFTER)
        == state_score("#P#", AFTER)
        == state_score("x" * 100_000, AFTER)
        == 0.0
    )


def test_the_coordinate_sentence_must_be_right_for_a_whole_point() -> None:
    world = Sokoban()
    world.reset(123)
    truth = world.render("text_with_coordinates")
    assert state_score(truth, truth) == 1.0 and state_score(truth.replace("(3,2)", "(1,1)"), truth) == 0.5


def test_bonus() -> None:
    def answer(seen: str, expected: str) -> str:
        return (
            f"<think> <observation>\n{seen}\n</observation> so <prediction>\n{expected}\n</prediction> </think> "
            "<answer> Down </answer>"
        )

    assert world_model_bonus(parse(answer(BEFORE, AFTER), "state", 5), BEFORE, AFTER) == 1.0
    assert world_model_bonus(parse(answer(BEFORE, BEFORE), "state", 5), BEFORE, AFTER) == pytest.approx(0.5 + 0.5 / 6)
    assert world_model_bonus(parse("<answer> Down </answer>", "state", 5), BEFORE, AFTER) == 0.0
