"""Demonstrations of web tasks: the same ones whether one process plays them or several, and several only where that
is worth it.
"""

from dataclasses import replace
from typing import Any

import pytest

from terrella.core.errors import ConfigError
from terrella.data.shards.writer import ordered_map
from terrella.data.tokenizers import ByteTokenizer
from terrella.launch import recipe
from terrella.rl.webrl import oracle as oracles
from terrella.rl.webrl.config import WebSiteEnvironment
from terrella.rl.webrl.oracle import Oracle
from terrella.rl.webrl.prompts import Prompter
from terrella.rl.webrl.sites import Seat, pool_of
from terrella.rl.webrl.tasks import SiteTasks
from terrella.rl.worlds.base import StepResult
from terrella.rl.worlds.web.world import WebWorld


@pytest.fixture(scope="module")
def sites() -> WebSiteEnvironment:
    return recipe.load("webrl-tiny").env  # type: ignore[return-value]


def test_several_processes_play_what_one_plays(sites) -> None:
    oracle = Oracle(
        replace(sites, astray=0.7, noise=0.2, max_prompt_tokens=600), Prompter(ByteTokenizer(), 100_000), "strayed", 3
    )
    asked = [(task, number, sample) for number, task in enumerate(pool_of(sites)[:6]) for sample in (0, 1)]
    alone = list(ordered_map(oracle.demonstrated, asked, 0))
    assert list(ordered_map(replace(oracle).demonstrated, asked, 2, 2)) == alone
    assert [t.key for t, _, _ in alone] == [f"{n:06d}-{sample}" for n in range(6) for sample in (0, 1)]
    for sample in (0, 1):  # every demonstration has random numbers of its own: some went astray, some did not
        assert len({any(s.learn for s in t.steps) for t, _, _ in alone[sample::2]}) == 2


def test_only_right_steps_of_successes_are_imitated_and_all_are_kept(sites) -> None:
    tasks = SiteTasks(replace(sites, astray=0.7, noise=0.2, max_prompt_tokens=600), None, ByteTokenizer(), None)
    tasks.stage, tasks.seed = "strayed", 3
    seats = [tasks.episode(task, number, 0) for number, task in enumerate(tasks.chosen(8))]
    played = tasks.play(tasks.player(seats), seats, tasks.params(1, 1.0), 0)
    lessons = [tasks.taught(seat, t, 0.0) for seat, t in zip(seats, played, strict=True)]
    assert [len(steps) for steps in lessons] == [t.info["steps"] for t in played]
    for steps, t in zip(lessons, played, strict=True):
        learnt = [lesson.learn for lesson in steps]
        assert learnt == [lesson.fields["meta.json"]["learn"] and t.reward == 1.0 for lesson in steps]
    assert {lesson.learn for steps in lessons for lesson in steps} == {True, False}


def test_demonstrations_that_are_not_there_are_named(sites) -> None:
    with pytest.raises(ConfigError, match=r"env.demonstrations = nowhere: no such folder"):
        SiteTasks(replace(sites, demonstrations="nowhere"), None, ByteTokenizer(), None)


@pytest.mark.parametrize(
    ("count", "cores", "browser", "workers"),
    [(300, 8, False, 0), (2100, 8, False, 2), (90_000, 8, False, 8), (90_000, 1, False, 0), (90_000, 8, True, 0)],
)
def test_processes_are_started_where_they_pay(
    sites, monkeypatch, count: int, cores: int, browser: bool, workers: int
) -> None:
    asked = []
    monkeypatch.setattr(oracles, "uses_browser", lambda sites: browser)
    monkeypatch.setattr(oracles, "ordered_map", lambda play, items, workers, chunk: asked.append(workers) or iter(()))
    monkeypatch.setattr(oracles, "usable_cores", lambda: cores)
    seats = [Seat(None, number, sample) for number in range(count) for sample in (0, 1)]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shorter"):  # nobody played
        Oracle(sites, Prompter(ByteTokenizer(), 100), "demos", 0).play(seats)
    assert asked == [workers]


@pytest.mark.parametrize("who", ["random policy", "oracle"])
def test_a_fault_of_the_sites_is_no_failure_of_those_who_play_beside_the_models(sites, monkeypatch, who: str) -> None:
    """Of three tasks one cannot be begun and one breaks at its first action: neither counts as solved or failed."""
    tasks = SiteTasks(replace(sites, max_prompt_tokens=600), None, ByteTokenizer(), None)
    tasks.stage, asked = "evaluate", tasks.of("test")[:3]
    assert who in tasks.scripts(asked)
    calm = tasks._scripted_by(who, asked)
    assert list(calm) == [(0, 0), (1, 0), (2, 0)]
    begin, act = WebWorld.open_task, WebWorld.step

    def begun(world: WebWorld, task: Any, steps: Any = ()) -> str:
        if task.task_id == asked[0].task.task_id:
            raise OSError("the site is down")
        return begin(world, task, steps)

    def acted(world: WebWorld, action: Any) -> StepResult:
        if world.task is not None and world.task.task_id == asked[1].task.task_id:
            raise OSError("the site is down")
        return act(world, action)

    monkeypatch.setattr(WebWorld, "open_task", begun)
    monkeypatch.setattr(WebWorld, "step", acted)
    assert tasks._scripted_by(who, asked) == {(2, 0): calm[2, 0]}
