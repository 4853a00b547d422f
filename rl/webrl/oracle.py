"""Demonstrations of the scripted oracles: played by one process or many, the same ones in the same order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ...core.process import usable_cores
from ...data.shards.writer import ordered_map
from ...data.trajectory import Trajectory
from ..worlds.web.generate import CONTENT, SiteTask
from ..worlds.web.world import WebWorld
from .config import WebSiteEnvironment
from .episode import WebEpisode, demonstrate
from .near_misses import stray
from .prompts import Prompter
from .sites import Seat, make_world, pool_of, uses_browser
from .steps import WebTrajectory, key_of

PART = 250  # demonstrations that a process plays at a time
WORTH = 2000  # demonstrations that repay the start of a process


@dataclass
class Oracle:
    """Plays tasks; a copy of it plays in another process. `stage` and `seed` decide its noise and its mistakes."""

    sites: WebSiteEnvironment
    prompter: Prompter
    stage: str
    seed: int

    @cached_property
    def world(self) -> WebWorld:
        return make_world(self.sites)

    @cached_property
    def alike(self) -> dict[tuple[int, int], list[SiteTask]]:
        """The pool by kind of task."""
        kinds: dict[tuple[int, int], list[SiteTask]] = {}
        for task in pool_of(self.sites):
            kinds.setdefault(_kind(task), []).append(task)
        return kinds

    def play(self, seats: Sequence[Seat]) -> list[Trajectory]:
        """Play all seats; many on all cores at once."""
        workers = min(usable_cores(), len(seats) // WORTH)
        if workers < 2 or uses_browser(self.sites):
            workers = 0
        asked = [(seat.task, seat.prompt_id, seat.sample_index) for seat in seats]
        played = []
        for seat, (kept, cut, steps) in zip(seats, ordered_map(self.demonstrated, asked, workers, PART), strict=True):
            seat.kept, seat.cut = kept, cut
            info = {"success": kept.success, "steps": steps, "site": kept.site}
            played.append(Trajectory(seat.prompt_id, seat.sample_index, [], kept.reward, [], info))
        return played

    def demonstrated(self, asked: tuple[SiteTask, int, int]) -> tuple[WebTrajectory, bool, int]:
        """One demonstration, whether a page of it was cut, and its actions."""
        task, number, sample = asked
        rng = random.Random(f"{self.seed} {self.stage} {number}" + (f" {sample}" if sample else ""))
        episode = WebEpisode(self.world, task, number, sample, self.prompter)
        if self.sites.astray and rng.random() < self.sites.astray:
            stray(episode, rng.choice(self.alike[_kind(task)]).steps, rng)
        else:
            demonstrate(episode, self.sites.noise, rng)
        if episode.fault is not None:
            raise RuntimeError(f"task {task.task.task_id}: {episode.fault.reason}")
        return episode.trajectory(key_of(number, sample)), episode.cut > 0, len(episode.rounds)


def _kind(task: SiteTask) -> tuple[int, int]:
    """Template and content: tasks that differ in what they name alone."""
    return task.task.template_id, int(task.task.raw.get(CONTENT, 0))
