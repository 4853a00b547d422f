"""Tasks: YAML tags that name a world, its settings, its limits and its instructions. A user adds tags without code."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...core.schema import Located, build, located, read_yaml
from ..text_games.world import TextGame
from .bandit import Bandit
from .base import World
from .countdown import Countdown
from .frozen_lake import FrozenLake
from .qa import QA
from .sokoban import Sokoban
from .sudoku import Sudoku
from .web.world import WebWorld
from .webshop import WebShop

ROTATION = 1000  # turns of a rotation, and so how finely it takes weights
WORLDS: dict[str, type[World]] = {
    w.name: w for w in (Sokoban, FrozenLake, Sudoku, Countdown, QA, Bandit, WebShop, WebWorld, TextGame)
}


@dataclass(frozen=True)
class TagFile:
    """What one tag may say. `config` holds the world's own settings."""

    world: str
    max_actions: int = 10
    max_tokens: int = 100  # only named in the prompt
    instruction: str = ""
    state_instruction: str = ""  # for the state-estimation format; the plain one where it is empty


@dataclass(frozen=True)
class Task(TagFile):
    """A tag ready for use, its settings already checked against the world's dataclass."""

    name: str = ""
    config: dict[str, Any] = field(default_factory=dict, hash=False)

    def make(self) -> World:
        """A world of this task, not yet reset."""
        return WORLDS[self.world](**self.config)


def _task(name: str, item: Located) -> Task:
    if not isinstance(item.value, dict):
        raise ConfigError(f"{item.where}: {name}: a tag is a mapping with at least the key world")
    settings = dict(item.value)
    config = settings.pop("config", None)
    tag = build(TagFile, Located(settings, item.where), name)
    if tag.world not in WORLDS:
        raise ConfigError(f"{item.where}: {name}.world = {tag.world!r} must be one of {', '.join(sorted(WORLDS))}")
    kind = WORLDS[tag.world].Config
    checked = build(kind, config or Located({}, item.where), f"{name}.config")
    values = {f.name: getattr(checked, f.name) for f in dataclasses.fields(kind)}
    return Task(**{f.name: getattr(tag, f.name) for f in dataclasses.fields(tag)}, name=name, config=values)


def load_tasks(*files: str | Path) -> dict[str, Task]:
    """All tags: those shipped in tags.yaml, then those of each file, later ones replacing earlier ones of the same
    name.
    """
    tasks: dict[str, Task] = {}
    for tree in (read_yaml(Path(__file__).with_name("tags.yaml"), "tags.yaml"), *(read_yaml(Path(f)) for f in files)):
        if not isinstance(tree.value, dict):
            raise ConfigError(f"{tree.where}: a file of tags is a mapping from their names")
        for name, item in tree.value.items():
            tasks[name] = _task(name, item)
    return tasks


def named_tasks(
    tags: Sequence[str], files: Sequence[str | Path] = (), config: dict[str, Any] | None = None
) -> dict[str, Task]:
    """The tags of these names, refused by name where there is none such; `config` changes settings of their worlds."""
    known = load_tasks(*files)
    for tag in tags:
        if tag not in known:
            raise ConfigError(f"tags: '{tag}' is neither shipped nor in tag_files; there are {', '.join(known)}")
    return {tag: _changed(known[tag], config or {}) for tag in tags}


def _changed(task: Task, config: dict[str, Any]) -> Task:
    if not config:
        return task
    checked = build(WORLDS[task.world].Config, located(task.config | config, "env.config"), task.name)
    return dataclasses.replace(task, config=vars(checked))


def rotation(weights: dict[str, float]) -> list[str]:
    """Tags in turn, each as often as its weight says and evenly spread; the list is gone through again and again."""
    if len(weights) == 1:
        return list(weights)
    total, credit, turns = sum(weights.values()), dict.fromkeys(weights, 0.0), []
    for _ in range(ROTATION):
        credit = {tag: credit[tag] + weight / total for tag, weight in weights.items()}
        turns.append(max(credit, key=lambda tag: round(credit[tag], 6)))  # what rounding did decides no turn
        credit[turns[-1]] -= 1.0
    return turns
