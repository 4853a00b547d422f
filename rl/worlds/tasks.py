"""Tasks: YAML tags that name a world, its settings, its limits and its instructions. A user adds tags without code."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...core.schema import Located, build, parse_yaml
from .bandit import Bandit
from .base import World
from .countdown import Countdown
from .frozen_lake import FrozenLake
from .qa import QA
from .sokoban import Sokoban
from .sudoku import Sudoku
from .web.world import WebWorld
from .webshop import WebShop

WORLDS: dict[str, type[World]] = {w.name: w for w in (Sokoban, FrozenLake, Sudoku, Countdown, QA, Bandit, WebShop, WebWorld)}


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
    config: dict[str, Any] = field(default_factory=dict)

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
    """All tags: those shipped in tags.yaml, then those of each file, later ones replacing earlier ones of the same name."""
    shipped = resources.files(__package__ or "terrella.rl.worlds").joinpath("tags.yaml")
    sources = [("tags.yaml", shipped.read_text(encoding="utf-8"))]
    for file in files:
        try:
            sources.append((str(file), Path(file).read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"{file}: cannot read the tags: {error.strerror}") from error
    tasks: dict[str, Task] = {}
    for source, text in sources:
        for name, item in parse_yaml(text, source).value.items():
            tasks[name] = _task(name, item)
    return tasks


def allocate(weights: dict[str, float], groups: int) -> list[str]:
    """The tag of each group, in the order of `weights`, shares rounded by largest remainder so that they sum to `groups`."""
    total = sum(weights.values())
    if not weights or min(weights.values()) < 0 or total <= 0:
        raise ValueError(f"weights: need a positive sum and no negative weight, not {weights}")
    exact = {tag: groups * weight / total for tag, weight in weights.items()}
    counts = {tag: int(share) for tag, share in exact.items()}
    for tag in sorted(exact, key=lambda t: counts[t] - exact[t])[: groups - sum(counts.values())]:
        counts[tag] += 1
    return [tag for tag, count in counts.items() for _ in range(count)]


def group_seeds(base: int, step: int, groups: int) -> range:
    """Training seeds of one step: base + step * groups and on. Validation uses step 0 every time."""
    return range(base + step * groups, base + (step + 1) * groups)
