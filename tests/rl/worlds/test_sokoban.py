"""Sokoban: golden parity, the pure transition, the batch against the scalar world, and the coordinate text."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrella.rl.worlds import sokoban
from terrella.rl.worlds.base import WorldFault
from terrella.rl.worlds.sokoban_rooms import RoomConfig, make_rooms
from terrella.rl.worlds.sokoban_text import coordinate_sentence, with_coordinates
from terrella.tests.rl.worlds.parsed import parse_sokoban

SIMPLE = RoomConfig()


def test_a_push_by_hand() -> None:
    assert sokoban.next_text("#####\n#PXO#\n#####", sokoban.RIGHT) == "#####\n#_P√#\n#####"
    assert sokoban.next_text("#####\n#_P√#\n#####", sokoban.RIGHT) == "#####\n#_P√#\n#####"
    assert sokoban.next_text("######\n#P√__#\n######", sokoban.RIGHT) == "######\n#_SX_#\n######"
    assert sokoban.next_text("######\n#_SX_#\n######", sokoban.LEFT) == "######\n#POX_#\n######"
    assert sokoban.next_text("######\n#PXXO#\n######", sokoban.RIGHT) == "######\n#PXXO#\n######"
    before, after = sokoban.decode("#####\n#PXO#\n#####"), sokoban.decode("#####\n#_P√#\n#####")
    assert sokoban.step_reward(before, after) == pytest.approx(10.9)
    assert sokoban.step_reward(sokoban.decode("#P√__X#"), sokoban.decode("#_SX_X#")) == pytest.approx(-1.1)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31), boxes=st.integers(1, 2), actions=st.lists(st.integers(1, 4), min_size=1, max_size=30)
)
def test_batch_scalar_and_text_agree(seed: int, boxes: int, actions: list[int]) -> None:
    config = RoomConfig(boxes=boxes, search_depth=30)
    cells = np.repeat(make_rooms(config, [seed]), 3, axis=0)
    player = (cells >= 5).argmax(1)
    codes = bytes(cells[0])
    for action in actions:
        moved, gain = sokoban.step_batch(cells, player, np.array([action, action, 1 + action % 4]), 6)
        after = sokoban.next_codes(codes, action)
        assert bytes(cells[0]) == bytes(cells[1]) == after and sokoban.next_text(
            sokoban.encode(codes), action
        ) == sokoban.encode(after)
        assert moved[0] == (after != codes) and gain[0] == after.count(3) - codes.count(3)
        assert player[0] == next(i for i, c in enumerate(after) if c >= 5)
        assert (
            sum(c >= 5 for c in after) == 1
            and sum(c in (3, 4) for c in after) == boxes
            and sum(c in (2, 3, 6) for c in after) == boxes
        )
        text = with_coordinates(sokoban.encode(after))
        assert parse_sokoban(text) == sokoban.encode(after)
        codes = after


def test_coordinates_name_every_kind() -> None:
    text = "######\n#S√XX#\n#O_O_#\n######"
    sentence = coordinate_sentence(text)
    boxes = "boxes (X) are at (1,3), (1,4); box on target (√) is at (1,2)"
    assert sentence == f"Player on target (S) is at (1,1); {boxes}; targets (O) are at (2,1), (2,3)."
    assert coordinate_sentence("#PXO#") == "Player (P) is at (0,1); box (X) is at (0,2); target (O) is at (0,3)."
    with pytest.raises(ValueError, match="does not describe"):
        parse_sokoban(text + "\n" + sentence.replace("(1,1)", "(1,2)"))


def test_config_vocabulary_and_faults() -> None:
    world = sokoban.Sokoban(grid="W.GCBA@", actions=("Left", "Right", "Up", "Down"))
    text = world.reset(123)
    assert (
        set(text) <= set("W.GCBA@\n")
        and parse_sokoban(world.render("text_with_coordinates"), world.config.grid) == text
    )
    assert world.parse_action("left") == 1 and world.parse_action("jump") is None
    with pytest.raises(ValueError, match="seven different"):
        sokoban.Sokoban(grid="_______")
    with pytest.raises(WorldFault, match="before reset"):
        sokoban.Sokoban().step(1)


def test_room_generation_is_fast() -> None:
    spent = []
    for first in (0, 300, 600):
        start = time.process_time()
        make_rooms(SIMPLE, range(first, first + 300))
        spent.append((time.process_time() - start) / 300)
    assert min(spent) < 1e-3  # 0.43 ms measured
