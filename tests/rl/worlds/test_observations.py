"""States told as places: with the picture, or alone where nothing else is to know."""

import pytest

from terrella.rl.worlds.frozen_lake import FrozenLake
from terrella.rl.worlds.sokoban import Sokoban, make_room, shortest_solution
from terrella.rl.worlds.sokoban_rooms import FLOOR, WALL, RoomConfig
from terrella.tests.rl.worlds.parsed import parse_lake, parse_sokoban


@pytest.mark.parametrize("world", [Sokoban, FrozenLake])
def test_places_come_with_the_picture_or_alone(world: type) -> None:
    more = {"open": True} if world is Sokoban else {}
    plain, both, alone = (world(observation=o, **more) for o in ("grid", "grid_coord", "coord"))
    for seed in range(20):
        picture = plain.reset(seed)
        told = plain.render("text_with_coordinates")
        assert (parse_sokoban if world is Sokoban else parse_lake)(told)
        places = told.removeprefix(picture + "\n")
        assert both.reset(seed) == f"{places}\n{picture}" and alone.reset(seed) == places
        assert both.render("text_with_coordinates") == told  # the state-estimation text does not depend on it


def test_open_rooms_have_no_inner_walls_and_are_solvable() -> None:
    config = RoomConfig(search_depth=3, open=True)
    for seed in range(50):
        room, _ = make_room(config, seed)
        inside = [room[r * 6 + c] for r in range(1, 5) for c in range(1, 5)]
        assert WALL not in inside and inside.count(FLOOR) >= 13 and shortest_solution(room, 6, 6)
    with pytest.raises(ValueError, match="observation: coord"):
        Sokoban(observation="coord")
