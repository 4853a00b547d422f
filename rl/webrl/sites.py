"""The worlds and tasks that the settings of web sites name, and how many episodes are open on them at once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from ...core.errors import ConfigError
from ...core.process import usable_cores
from ...data.trajectory import Trajectory
from ..environment import Split
from ..multiturn import Limits, rollout_worlds
from ..rollout.sampler import Sampler, SamplingParams
from ..worlds.tasks import Task, load_tasks
from ..worlds.web.generate import SiteTask
from ..worlds.web.hosted import HostedWorld, call_limit_s
from ..worlds.web.reset import Room, Shares, parts, run_reset
from ..worlds.web.tasks import parse_task
from ..worlds.web.world import WebConfig, WebWorld
from .config import WebSiteEnvironment
from .episode import WebEpisode
from .prompts import Prompter
from .steps import WebTrajectory

TASKS = "tasks.json"  # in the folder of a stage that chose tasks


@lru_cache(maxsize=2)
def _tags(files: tuple[str, ...]) -> dict[str, Task]:
    return load_tasks(*files)


def tag_of(settings: WebSiteEnvironment, split: Split) -> Task:
    """The tag of a split."""
    tag = settings.test_tag if split == "test" else settings.tag
    known = _tags(tuple(settings.tag_files))
    if tag not in known or known[tag].world != "web":
        raise ConfigError(f"env.tag: '{tag}' is no tag of a web world; see rl/worlds/tags.yaml and tag_files")
    return known[tag]


def uses_browser(settings: WebSiteEnvironment) -> bool:
    """Whether the training tasks are played in Chromium."""
    return tag_of(settings, "train").config["backend"] == "chromium"


def lives_elsewhere(settings: WebSiteEnvironment, split: Split) -> bool:
    """Whether the tasks are of a file, on sites that are not ours and keep what is done to them."""
    return tag_of(settings, split).config["source"] == "file"


def make_world(settings: WebSiteEnvironment, split: Split = "train") -> WebWorld:
    """A world of a split's tag."""
    tag = tag_of(settings, split)
    if tag.config["backend"] == "chromium":  # stages call worlds from several threads
        return HostedWorld(browsers=settings.browsers, **tag.config)
    world = tag.make()
    assert isinstance(world, WebWorld)
    return world


def pool_of(settings: WebSiteEnvironment, split: Split = "train") -> list[SiteTask]:
    """All tasks of a split's tag, of the chosen templates."""
    known = make_world(settings, split).tasks
    tasks = [
        replace(t, split=split) for t in known if not settings.templates or t.task.template_id in settings.templates
    ]
    if not tasks:
        tag = settings.test_tag if split == "test" else settings.tag
        if not known:
            raise ConfigError(f"env.tag: '{tag}' has no tasks; see its split, sites and instances")
        raise ConfigError(f"env.templates: no task of {settings.templates} under the tag '{tag}'")
    return tasks


def reset_sites(settings: WebSiteEnvironment, split: Split) -> None:
    """Bring the sites of a task file back before a stage plays on them, by the user's command."""
    config = tag_of(settings, split).config
    if config["reset_phase_command"]:
        sites = sorted({site for task in pool_of(settings, split) for site in task.task.sites})
        run_reset(config["reset_phase_command"], sites, "", config["reset_deadline_s"])


def write_tasks(path: Path, tasks: Sequence[SiteTask]) -> None:
    """Tasks as a later stage reads them."""
    path.write_text(
        json.dumps([{"record": dict(t.task.raw), "steps": t.steps} for t in tasks], ensure_ascii=False),
        encoding="utf-8",
    )


def read_tasks(path: Path) -> list[SiteTask]:
    """The tasks that a stage chose."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [SiteTask(parse_task(row["record"]), "train", tuple(tuple(s) for s in row["steps"])) for row in rows]


@dataclass
class Seat:
    """A sample of a task to be played. `episode` is the last one begun there; a fault may have begun several."""

    task: SiteTask
    prompt_id: int
    sample_index: int
    episode: WebEpisode | None = None
    kept: WebTrajectory | None = None  # of a demonstration, whose episode is gone
    cut: bool = False  # a page of it did not fit


class Players:
    """Worlds that are used again: starting one anew costs more than an episode. Several rollouts may go on at once."""

    def __init__(self, settings: WebSiteEnvironment, prompter: Prompter, split: Split = "train") -> None:
        self.settings, self.prompter = settings, prompter
        self.split: Split = split
        self.worlds: list[WebWorld] = []  # that nobody plays in
        self.rooms: dict[Shares, Room] = {}

    def shares(self, ranks: int) -> Shares:
        """How many episodes this rank may have open. The limits of sites and accounts hold over all ranks that play."""
        config = tag_of(self.settings, self.split).config
        limits = {name: int(config[name]) for name in ("at_once_per_site", "at_once_per_account")}
        for name, limit in limits.items():
            if 0 < limit < ranks:
                raise ConfigError(
                    f"{name}: {limit} is below the {ranks} ranks that play at once; raise it, or use fewer data ranks"
                )
        return Shares(self.settings.at_once, *(limit // ranks for limit in limits.values()))

    def parts(self, seats: Sequence[Seat], ranks: int) -> list[list[tuple[int, Seat]]]:
        """Numbered seats that may be open together."""
        return parts(list(enumerate(seats)), lambda placed: placed[1].task.task, self.shares(ranks))

    def episode(self, place: int, task: SiteTask, prompt_id: int, sample: int) -> WebEpisode:
        """A task begun in the world at a place, while no rollout goes on."""
        while len(self.worlds) <= place:
            self.worlds.append(make_world(self.settings, self.split))
        return WebEpisode(self.worlds[place], task, prompt_id, sample, self.prompter)

    def limits(self) -> Limits:
        """Page models compute, so that more threads than cores would only be in one another's way; browsers and slow
        sites are waited for. A call may have to wait for those of other worlds in its browser.
        """
        config, at_once = WebConfig(**tag_of(self.settings, self.split).config), self.settings.at_once
        workers = at_once if config.backend == "chromium" or config.latency_ms else min(usable_cores(), at_once)
        world_s = call_limit_s(config) * (1 + at_once) if config.backend == "chromium" else Limits.world_s
        return Limits(workers=workers, max_turns=config.max_steps, world_s=world_s, reward_s=world_s)

    def play(
        self, sampler: Sampler, seats: Sequence[Seat], params: SamplingParams, seed: int, ranks: int
    ) -> list[Trajectory]:
        """All seats to the end of their episodes. With a stream each begins when there is room for it; else so many
        at a time as may be open together.
        """
        shares, numbered, limits = self.shares(ranks), list(enumerate(seats)), self.limits()
        room = self.rooms.setdefault(shares, Room(shares))
        played: dict[int, Trajectory] = {}
        for part in [numbered] if hasattr(sampler, "submit") else self.parts(seats, ranks):
            stays = [_Stay(self, room, seat) for _, seat in part]
            results = rollout_worlds(
                sampler, [stay.make for stay in stays], params, seed, limits, seat=lambda n, s=stays: s[n].seated()
            )
            played.update(zip((number for number, _ in part), results, strict=True))
        return [played[number] for number in range(len(seats))]


@dataclass
class _Stay:
    """A seat while it is played: the world that it has, another one after a fault."""

    players: Players
    room: Room
    seat: Seat
    world: WebWorld | None = None

    @asynccontextmanager
    async def seated(self) -> AsyncIterator[None]:
        """Open within this block. A world whose episode did not end may be in use by a call that was given up, so
        nobody gets it any more.
        """
        async with self.room.seat(self.seat.task.task):
            try:
                yield
            finally:
                episode = self.seat.episode
                if self.world is not None and episode is not None and episode.world is self.world and episode.ended:
                    self.players.worlds.append(self.world)

    def make(self) -> WebEpisode:
        players, seat = self.players, self.seat
        try:
            world = players.worlds.pop() if self.world is None else make_world(players.settings, players.split)
        except IndexError:
            world = make_world(players.settings, players.split)
        self.world = world
        episode = WebEpisode(world, seat.task, seat.prompt_id, seat.sample_index, players.prompter)
        if self.world is world:  # else it came so late that another was begun in its place
            seat.episode = episode
        return episode
