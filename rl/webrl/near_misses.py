"""Scripted near misses: the oracle's script with one mistake of the kinds that actors make. The world says what came
of it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from ..worlds.web.backend import ActionFailed
from ..worlds.web.generate import resolve
from ..worlds.web.templates import Step
from .episode import WebEpisode

MISTAKES = ("other", "mixed", "answer", "early", "skipped", "wandered")
WANDER: Step = ("wander", "")  # a random action, whatever the page is
SAID: Step = ("said", "")  # an exit with something that the page shows
_SHOWN = re.compile(r'data-text="([^"]{1,60})"')


def mistaken(own: Sequence[Step], other: Sequence[Step], rng: random.Random) -> list[Step]:
    """A script with one mistake. `other` is the script of another task of the same template: the right way to the wrong
    thing. What was not looked up is not known: where the task asks for an answer, the exit then says something that the
    page shows."""
    way, end = list(own[:-1]), own[-1]
    guess = SAID if end[1] else end
    kind = rng.choice([k for k in MISTAKES if k != "answer" or end[1]])
    differing = [i for i, (a, b) in enumerate(zip(way, other, strict=False)) if a != b and a[0] == b[0]]
    place = rng.randrange(len(way) + 1)
    if kind == "other":
        return list(other)
    if kind == "answer":
        return [*way, other[-1] if other[-1] != end and rng.random() < 0.5 else SAID]
    # one word of it is wrong: the amount, the name that is typed, the item that is clicked
    if kind == "mixed" and differing:
        place = rng.choice(differing)
        return [*way[:place], other[place], *way[place + 1 :], guess]
    if kind == "early":
        return [*way[:place], guess if place < len(way) else end]
    if kind == "skipped" and place < len(way):
        return [*way[:place], *way[place + 1 :], guess]
    return [*way[:place], WANDER, *way[place:], end]


def stray(episode: WebEpisode, other: Sequence[Step], rng: random.Random) -> None:
    """Play a mistaken script to the end. Where a step finds no element the episode ends there. No step is to be
    imitated.
    """
    script = mistaken(episode.task.steps, other, rng)
    for step in script:
        if episode.context() is None:
            break
        _act(episode, step, rng)
    if not episode.world.done and episode.fault is None:
        raise ValueError(f"task {episode.task.task.task_id}: its script does not end with exit")
    episode.score()


def _act(episode: WebEpisode, step: Step, rng: random.Random) -> None:
    world, encode = episode.world, episode.prompter.tokenizer.encode
    asked = bool(episode.task.steps[-1][1])
    said: Step = ("exit", rng.choice(_SHOWN.findall(world.html) or [""]) if asked else "")
    if step == WANDER:
        text = world.random_action(rng)
    else:
        try:
            text = resolve(said if step == SAID else step, world.page).call
        except ActionFailed:
            text = resolve(said, world.page).call
    episode.act((*encode(text), episode.prompter.stop_id), text, learn=False)
