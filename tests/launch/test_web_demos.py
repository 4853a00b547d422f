"""Demonstrations of web tasks: the same ones whether one process plays them or several, and several only where that is worth it."""

from dataclasses import replace

import pytest

from terrella.data.shards.writer import ordered_map
from terrella.data.tokenizers import ByteTokenizer
from terrella.launch import recipe
from terrella.launch.settings.web import WebDemos
from terrella.launch.stages import web_demos
from terrella.launch.stages.web import pool_of
from terrella.rl.webrl.prompts import Prompter


@pytest.fixture(scope="module")
def start():
    return recipe.load("webrl-tiny").stages[0]


def test_several_processes_play_what_one_plays(start) -> None:
    stage = WebDemos("web-demos", "strayed", count=6, samples=2, astray=0.7, noise=0.2)
    oracle = web_demos.Oracle(stage, start, Prompter(ByteTokenizer(), 100_000), 3)
    tasks = list(enumerate(pool_of(start)[:6]))
    alone = list(ordered_map(oracle.play, tasks, 0))
    assert list(ordered_map(replace(oracle).play, tasks, 2, 2)) == alone
    keys = [t.key for found in alone for t, _ in found]
    assert keys == [f"{n:06d}-{sample}" for n in range(6) for sample in (0, 1)]
    for sample in (0, 1):  # every demonstration has random numbers of its own: some went astray, some did not
        assert len({any(s.learn for s in found[sample][0].steps) for found in alone}) == 2


@pytest.mark.parametrize(
    ("count", "cores", "browser", "workers"),
    [(300, 8, False, 0), (2100, 8, False, 2), (90_000, 8, False, 8), (90_000, 1, False, 0), (90_000, 8, True, 0)],
)
def test_processes_are_started_where_they_pay(start, monkeypatch, count: int, cores: int, browser: bool, workers: int) -> None:
    asked = []
    monkeypatch.setattr(web_demos, "start_of", lambda job: start)
    monkeypatch.setattr(web_demos, "prompter_of", lambda job: None)
    monkeypatch.setattr(web_demos, "uses_browser", lambda start: browser)
    monkeypatch.setattr(web_demos, "ordered_map", lambda play, items, workers, chunk: asked.append(workers) or [])
    monkeypatch.setattr(web_demos, "usable_cores", lambda: cores)
    job = type("Job", (), {"recipe": type("Recipe", (), {"seed": 0})})
    stage = WebDemos("web-demos", "demos", count=count, samples=2)
    assert web_demos._played(stage, job, [None] * count) == ([], 0)
    assert asked == [workers]
