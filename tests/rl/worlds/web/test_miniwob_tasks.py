"""MiniWoB++ pages as tasks: they are listed, written and read without a browser."""

import json

import pytest

from terrella.rl.worlds.web.miniwob_tasks import miniwob_tasks, place_of
from terrella.rl.worlds.web.tasks import parse_task
from terrella.rl.worlds.web.world import WebWorld


def test_a_page_and_a_seed_make_a_task_that_travels_through_files() -> None:
    found = miniwob_tasks(("click-button", "no-oracle"), 3, "all")
    assert len(found) == 12 and len({t.task.task_id for t in found}) == 12
    train, test = ([t for t in found if t.split == part] for part in ("train", "test"))
    assert {place_of(t.task)[1] for t in train}.isdisjoint(place_of(t.task)[1] for t in test)
    assert all(bool(t.steps) == (t.task.template == "click-button") for t in found)
    again = parse_task(json.loads(json.dumps(dict(found[0].task.raw))))
    assert again == found[0].task and place_of(again) == ("click-button", 0)
    assert [t.task.template_id for t in found[:2]] == [0, 1]


def test_a_world_lists_them_without_opening_a_browser() -> None:
    world = WebWorld(
        source="miniwob", backend="chromium", pages=("click-button", "enter-text"), instances=2, split="test"
    )
    assert [t.task.task_id for t in world.tasks[:2]] == [
        "click-button.1000000",
        "enter-text.1000000",
    ] and world.backend is None
    with pytest.raises(ValueError, match="no key miniwob"):
        place_of(parse_task({**dict(world.tasks[0].task.raw), "miniwob": None}))
