"""Worlds by name, and one play of a world: every interface to other trainers is built on these. Importable without
torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...core.errors import ConfigError, did_you_mean
from ..text_games.crawl import GAMES, find_game
from ..text_games.world import TextGame
from ..web_pages.record import APPS
from ..worlds.base import Snapshot, World, WorldFault
from ..worlds.tabletop import PLAIN, TASKS, Table
from ..worlds.tasks import load_tasks

GAME, PAGE, TABLE = "text-game/", "web-page/", "tabletop/"  # before names of games, pages and tasks


@dataclass(frozen=True)
class NamedWorld:
    """A world that can be played by name: how it is made, the player's instructions, and the number of actions."""

    name: str
    make: Callable[[], World]
    instruction: str = ""
    max_actions: int = 10
    frame: tuple[int, int] | None = None  # height and width, where the world shows pictures


def names(*tag_files: str) -> list[str]:
    """The names of all worlds: tags (also those of the given files), text games, pages, the table top."""
    further = [(GAME, GAMES), (PAGE, APPS), (TABLE, TASKS)]
    return [*load_tasks(*tag_files), *(f"{before}{name}" for before, known in further for name in known)]


def find_world(name: str, *tag_files: str) -> NamedWorld:
    """The world of this name; the error for an unknown one suggests the nearest."""
    if name.startswith(GAME) and name.removeprefix(GAME) in GAMES:
        game = find_game(name.removeprefix(GAME))
        return NamedWorld(name, lambda: TextGame(game.name), f"{game.task}\nAn action is one line of text.", 50)
    if name.startswith(PAGE) and name.removeprefix(PAGE) in APPS:
        return page_world(name.removeprefix(PAGE))
    if name.startswith(TABLE) and name.removeprefix(TABLE) in TASKS:
        return table_world(name.removeprefix(TABLE))
    tasks = load_tasks(*tag_files)
    if name not in tasks:
        hint = did_you_mean(name, names(*tag_files), "`terrella worlds list` names them")
        raise ConfigError(f"'{name}' is no world{hint}")
    task = tasks[name]
    return NamedWorld(name, task.make, task.instruction, task.max_actions)


def page_world(app: str) -> NamedWorld:
    """One of our small pages, in Chromium."""
    from ..web_pages import world as pages

    instruction = f"Explore the page. An action is {pages.ACTIONS}."
    return NamedWorld(f"{PAGE}{app}", lambda: pages.PageWorld(app), instruction, pages.LONGEST)


def table_world(task: str, table: Table = PLAIN) -> NamedWorld:
    """A task of the table top, in MuJoCo."""
    from ..video.world import LONGEST, TableWorld

    instruction = f"{TASKS[task].capitalize()}. An action is {TableWorld(task, table).actions}."
    return NamedWorld(
        f"{TABLE}{task}", lambda: TableWorld(task, table), instruction, LONGEST, (table.height, table.width)
    )


@dataclass(frozen=True)
class Turn:
    """What the player sees after a reset or an action."""

    text: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False  # the actions are used up
    info: dict[str, float] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class Play:
    """Plays one episode after another of a world, each within its number of actions.

    A text that is not an action leaves the world unchanged and counts as one; `info` says so.
    """

    def __init__(self, named: NamedWorld) -> None:
        self.named, self.world = named, named.make()
        self.seed, self.actions, self.last = 0, 0, Turn("")

    @property
    def words(self) -> list[str] | None:
        """The actions, in the order of their ids; None where an action is free text."""
        return None if self.world.action_words is None else list(self.world.action_words.values())

    def reset(self, seed: int, sample: int = 0) -> Turn:
        """Begin the instance of this seed; each `sample` of it has other chance moves."""
        self.seed, self.actions = seed, 0
        self.last = Turn(self.world.reset(seed, sample))
        return self.last

    def step(self, text: str) -> Turn:
        """One action, as its word or text."""
        if self.last.done or not self.last.text:
            raise WorldFault(f"{self.named.name}: the episode is over or was never started; call reset first")
        action = self.world.parse_action(text)
        self.actions += 1
        spent, single = self.actions >= self.named.max_actions, self.named.max_actions == 1
        if action is None:
            info = {"success": 0.0, "action_is_valid": 0.0, "action_is_effective": 0.0}
            text, reward, done = self.last.text, 0.0, False
        else:
            result = self.world.step(action)
            info = {"action_is_valid": 1.0, **{name: float(value) for name, value in result.info.items()}}
            text, reward, done = result.text, float(result.reward), result.done
        done = done or single  # a question ends with its one answer: that is not a limit of ours
        self.last = Turn(text, reward, done, spent and not done, info)
        return self.last

    def random_action(self, rng: random.Random) -> str:
        """A text that the world takes as an action; of a text game, one that it understands."""
        return self.world.random_action(rng)

    def snapshot(self) -> Snapshot:
        """The whole play as JSON values: `restore` goes back to it, in this or any other play of the same world."""
        last = self.last
        shown: dict[str, Any] = {"text": last.text, "reward": last.reward, "terminated": last.terminated}
        shown |= {"truncated": last.truncated, "info": dict(last.info)}
        return {
            "name": self.named.name,
            "seed": self.seed,
            "actions": self.actions,
            "last": shown,
            "world": self.world.snapshot(),
        }

    def restore(self, snapshot: Snapshot) -> Turn:
        """Go back to a snapshot; what was seen then."""
        if not isinstance(snapshot, dict) or snapshot.get("name") != self.named.name:
            known = snapshot.get("name") if isinstance(snapshot, dict) else snapshot
            raise WorldFault(f"{self.named.name}: a snapshot of {known!r} cannot be restored here")
        try:
            last, seed, actions = Turn(**snapshot["last"]), int(snapshot["seed"]), int(snapshot["actions"])
            self.world.restore(snapshot["world"])
        except (KeyError, TypeError, ValueError) as error:
            raise WorldFault(f"{self.named.name}: the snapshot is damaged: {type(error).__name__}: {error}") from error
        self.last, self.seed, self.actions = last, seed, actions
        return last
