"""Scripted near misses: one mistake in the oracle's script, plausible to the end, judged by the world and never
imitated.
"""

import random

import pytest

from terrella.data.tokenizers import ByteTokenizer
from terrella.rl.webrl.episode import WebEpisode
from terrella.rl.webrl.near_misses import MISTAKES, SAID, WANDER, mistaken, stray
from terrella.rl.webrl.prompts import Prompter
from terrella.rl.webrl.steps import WebTrajectory
from terrella.rl.worlds.web.world import WebWorld

OWN = (("search", "Search the shop", "Dune lamp"), ("click", "Dune lamp"), ("exit", "$4.50"))
OTHER = (("search", "Search the shop", "Ember rake"), ("click", "Ember rake"), ("exit", "$7.00"))


def test_a_mistaken_script_is_the_oracles_but_for_one_mistake() -> None:
    found = {tuple(mistaken(OWN, OTHER, random.Random(seed))) for seed in range(300)}
    assert OTHER in found  # the right way to the wrong thing
    assert {(*OWN[:2], OTHER[2]), (*OWN[:2], SAID)} <= found  # the right page and a wrong answer
    assert {(OTHER[0], OWN[1], SAID), (OWN[0], OTHER[1], SAID)} <= found  # one name is wrong
    assert {(SAID,), (OWN[0], SAID), (OWN[1], SAID)} <= found  # too early, or a step left out
    assert (WANDER, *OWN) in found
    without = tuple((*step[:1], "") if step[0] == "exit" else step for step in OWN)
    assert all(SAID not in mistaken(without, OTHER, random.Random(seed)) for seed in range(100))  # nothing was asked
    assert len(MISTAKES) == 6


def played(seed: int) -> list[WebTrajectory]:
    world = WebWorld(sites=("shopping", "map"), max_steps=12, max_repeats=3)
    prompter = Prompter(ByteTokenizer(), 100_000)
    tasks = [t for t in world.tasks if t.task.template_id in (101, 104, 507)]
    found = []
    for number, task in enumerate(tasks):
        rng = random.Random(f"{seed} {number}")
        other = rng.choice([t for t in tasks if t.task.template_id == task.task.template_id])
        episode = WebEpisode(world, task, number, 0, prompter)
        stray(episode, other.steps, rng)
        assert episode.fault is None and world.done
        found.append(episode.trajectory(str(number)))
    return found


def test_the_world_judges_near_misses() -> None:
    found = played(0)
    assert found == played(0)
    wins = sum(t.success for t in found)
    assert 0 < wins < 0.4 * len(found)  # a detour may still end well
    assert not any(s.learn for t in found for s in t.steps)
    failed = [t for t in found if not t.success]
    named = [t for t in failed if t.intent.split("the ")[-1].rstrip("?.") in t.steps[-1].html]
    assert len(named) > 0.2 * len(failed)  # the wanted thing is in sight, and it is a failure all the same
    assert sum(t.steps[-1].response.startswith("exit") for t in failed) > 0.8 * len(failed)


def test_a_script_without_an_end_is_refused() -> None:
    world = WebWorld(sites=("shopping",))
    task = next(t for t in world.tasks if t.task.template_id == 103)
    episode = WebEpisode(world, task, 0, 0, Prompter(ByteTokenizer(), 100_000))
    seed = next(s for s in range(100) if mistaken(task.steps, task.steps[:1], random.Random(s)) == [task.steps[0]])
    with pytest.raises(ValueError, match="does not end with exit"):
        stray(episode, task.steps[:1], random.Random(seed))
