"""What a world model of the local sites learns from: true transitions as accessibility trees, of the oracle's
actions and of others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from ..web_pages.prompt import PageTransition
from ..worlds.web.actions import parse_call
from ..worlds.web.generate import SiteTask
from ..worlds.web.world import WebWorld
from .world_models import brackets

FIRST = "None"  # the previous action of a first page, where the step begins no episode


def site_transitions(
    world: WebWorld, spare: WebWorld, tasks: Sequence[SiteTask], others: int, seed: int
) -> Iterator[PageTransition]:
    """In every state on the oracle's way: its action, and `others` random ones, tried in the spare world. Exits change
    no page and are left out. A task's first step has no previous action, which is how episodes are told apart."""
    for number, task in enumerate(tasks):
        rng = random.Random(f"{seed} {number}")
        world.open_task(task.task, task.steps)
        previous, asides = "", []
        while not world.done:
            before, held = world.render("accessibility"), world.snapshot()
            for _ in range(others):
                text = world.random_action(rng)
                if parse_call(text).kind == "exit":
                    continue
                spare.restore(held)
                spare.step(text)
                shown = brackets(parse_call(text), world.page)
                asides.append(
                    PageTransition(
                        world.page.url,
                        task.task.intent,
                        previous or FIRST,
                        before,
                        shown,
                        spare.render("accessibility"),
                    )
                )
            action = parse_call(world.demonstrate())
            url, shown = world.page.url, brackets(action, world.page)
            world.step(action.call)
            if action.kind != "exit":
                yield PageTransition(url, task.task.intent, previous, before, shown, world.render("accessibility"))
                previous = shown
        yield from asides
