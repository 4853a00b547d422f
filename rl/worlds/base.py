"""The World contract: what is acted on. Same seed, same instance; a snapshot restores exactly; a fault is Invalid,
never a zero.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ...core.errors import ConfigError
from ...core.files import json_lines, parse_json
from ...data.trajectory import Invalid

T = TypeVar("T")
Action = int | str
Row = TypeVar("Row")
Snapshot = dict[str, Any]  # plain JSON values only, so that a journal can keep it


class WorldFault(RuntimeError):
    """The machinery of a world failed: a missing file, a step before reset, a snapshot of another world."""


@dataclass(frozen=True)
class StepResult:
    """What one action gave. `info` holds numbers or booleans: success, action_is_effective, action_is_valid and the
    world's own.
    """

    text: str
    reward: float
    done: bool
    info: Mapping[str, float] = field(default_factory=dict)


class World(ABC):
    """One instance of one task. `action_words` maps action ids to words, or is None where an action is free text."""

    name: ClassVar[str]
    Config: ClassVar[type]  # the dataclass of its settings, given to the constructor as keywords
    action_words: dict[int, str] | None = None
    grid_words: dict[str, str] | None = None  # symbol -> meaning, for the prompt's legend
    render_modes: ClassVar[tuple[str, ...]] = ("text",)

    @abstractmethod
    def reset(self, seed: int, sample: int = 0) -> str:
        """Start the instance of this seed and return its text. `sample` tells members of a group apart: only chance
        moves may use it.
        """

    @abstractmethod
    def step(self, action: Action) -> StepResult:
        """Apply one action, as `parse_action` returned it."""

    @abstractmethod
    def render(self, mode: str = "text") -> str:
        """The state as text; `text_with_coordinates` adds the state-estimation sentence where the world has one."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """The whole state, hidden parts and random generators included, as JSON values."""

    @abstractmethod
    def restore(self, snapshot: Snapshot) -> None:
        """Return to a snapshot of a world of the same configuration."""

    def close(self) -> None:
        """Give back what the world holds, such as a browser."""
        return

    def drawing(self) -> str | None:
        """The state as a grid of symbols for a report, whatever the policy is shown; None for worlds that are no
        grid.
        """
        return None

    def picture(self) -> Any:
        """The state as a frame, uint8 [H, W, 3]; None for worlds that have no pictures."""
        return None

    def right_answer(self) -> str | None:
        """What the policy should have answered, for a report; None where there is no single answer."""
        return None

    def change(self, before: str, after: str) -> str:
        """How a world model is taught to write the state `after`: whole, unless most of it stays as it was."""
        return after

    def changed(self, before: str, written: str) -> str | None:
        """The state that a world model wrote so; None where it cannot be read."""
        return written

    def random_action(self, rng: random.Random) -> str:
        """A word or text that the world takes as an action, without looking at what it does."""
        if self.action_words is None:
            raise WorldFault(f"{self.name}: no random policy over free text")
        return rng.choice(list(self.action_words.values()))

    def parse_action(self, word: str) -> Action | None:
        """An action written by a policy, or None when it is not one (words are matched without case)."""
        if self.action_words is None:
            return word.strip() or None
        wanted = word.strip().lower()
        for action, name in self.action_words.items():
            if name.lower() == wanted:
                return action
        return None


def check_file(file: str | None) -> None:
    """Refuse a setting `file` that names none."""
    if file is not None and not Path(file).is_file():
        raise ValueError(f"file: {file}: no such file")


def read_rows(file: str, row_of: Callable[[Any], Row]) -> list[Row]:
    """What a function reads of every line of a JSONL file; a line that it cannot read is named."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as JSONL: {error}") from error
    rows: list[Row] = []
    for number, line in json_lines(text):
        try:
            rows.append(row_of(parse_json(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file}:{number}: {type(error).__name__}: {error}") from None
    return rows


def attempt(call: Callable[..., Any], *args: Any) -> Any | Invalid:
    """Run a world's method; any exception is a fault of the machinery and comes back as Invalid with its reason."""
    try:
        return call(*args)
    except Exception as error:
        return Invalid(f"{getattr(call, '__qualname__', call)}: {type(error).__name__}: {error}")


def next_seed(seed: int) -> int:
    """The seed to try when a seed has no instance: a stable hash, the same in every process."""
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest(), "little")


def check_mode(world: World, mode: str) -> None:
    """Refuse a render mode that the world does not have."""
    if mode not in world.render_modes:
        raise WorldFault(f"{world.name}: no render mode {mode!r}; it has {', '.join(world.render_modes)}")


def check_started(world: World, state: T | None) -> T:
    """The state of a world that was reset; one that was not is refused."""
    if state is None:
        raise WorldFault(f"{world.name}: step before reset; call reset(seed) or restore(snapshot) first")
    return state
