"""A world model's imagination: from a state and forced actions it predicts k states, each from its own last prediction.

The world must show its whole state as a grid; a state is the grid's characters in reading order, without line breaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...core.errors import ConfigError, did_you_mean
from ...core.rng import fold, uniform
from ...data.tokenizers import CharTokenizer
from ...data.trajectory import Invalid
from ..rollout.sampler import Sample
from ..worlds import sokoban
from ..worlds.sokoban_rooms import RoomConfig, make_room
from ..worlds.tasks import load_tasks

ACTION_LETTERS = "UDLR"  # action ids 1..4


@dataclass(frozen=True)
class GridDynamics:
    """The true world: its alphabet, its shape and its transition function on flat states."""

    rooms: RoomConfig

    @classmethod
    @lru_cache(maxsize=4)
    def of(cls, tag: str, setting: str = "world") -> GridDynamics:
        """The dynamics of a tag's world, which `setting` names; only worlds that show their whole state as a grid
        have them.
        """
        tasks = load_tasks()
        if tag not in tasks:
            hint = did_you_mean(tag, tasks, f"the tags are {', '.join(tasks)}")
            raise ConfigError(f"{setting}: '{tag}' is no tag{hint}")
        world = tasks[tag].make()
        if not isinstance(world, sokoban.Sokoban) or world.config.grid != sokoban.SYMBOLS:
            raise ConfigError(
                f"{setting}: '{tag}' has no grid dynamics to imagine; choose a Sokoban tag with the standard symbols"
            )
        return cls(RoomConfig(world.config.height, world.config.width, world.config.boxes, world.config.search_depth))

    @property
    def width(self) -> int:
        return self.rooms.width

    @property
    def cells(self) -> int:
        """Of a state, and so its tokens."""
        return self.rooms.height * self.rooms.width

    @property
    def symbols(self) -> str:
        return sokoban.SYMBOLS

    def start(self, seed: int) -> str:
        """The start state of the room of this seed."""
        return self.flat(sokoban.encode(make_room(self.rooms, seed)[0], self.width))

    def tokenizer(self) -> CharTokenizer:
        """One token a cell symbol, one an action."""
        return CharTokenizer(self.symbols + ACTION_LETTERS)

    def next(self, state: str, action: int) -> str:
        """The state after an action."""
        return self.flat(sokoban.next_text(self.grid(state), action))

    def grid(self, state: str) -> str:
        """A flat state as rows of text."""
        return "\n".join(state[i : i + self.width] for i in range(0, len(state), self.width))

    def flat(self, grid: str) -> str:
        """Rows of text as a flat state."""
        return grid.replace("\n", "")


@dataclass(frozen=True)
class ImaginationTask:
    """A start state, the forced actions and the true states after each of them."""

    prompt_id: int
    state: str
    actions: tuple[int, ...]
    truths: tuple[str, ...]


def room_of(count: int, prompt_id: int, seed: int) -> int:
    """Which of so many rooms the task of this id is in."""
    return int(uniform(fold(seed, prompt_id), 0) * count)


def make_task(
    dynamics: GridDynamics, rooms: Sequence[str], prompt_id: int, steps: int, walk: int, seed: int
) -> ImaginationTask:
    """The task of this id, in one of the rooms."""
    return task_in(dynamics, rooms[room_of(len(rooms), prompt_id, seed)], prompt_id, steps, walk, seed)


@lru_cache(maxsize=1024)  # all samples of a prompt ask for the same one
def task_in(dynamics: GridDynamics, room: str, prompt_id: int, steps: int, walk: int, seed: int) -> ImaginationTask:
    """The task of this id in a room: up to `walk` random actions to leave its start, then `steps` random actions to
    imagine.
    """
    key = fold(seed, prompt_id)
    state = room
    for i in range(int(uniform(key, 1) * (walk + 1))):
        state = dynamics.next(state, 1 + int(uniform(key, 2, i) * 4))
    actions = tuple(1 + int(uniform(key, 3, i) * 4) for i in range(steps))
    truths, current = [], state
    for action in actions:
        current = dynamics.next(current, action)
        truths.append(current)
    return ImaginationTask(prompt_id, state, actions, tuple(truths))


def prompt_ids(tokenizer: CharTokenizer, state: str, action: int) -> tuple[int, ...]:
    """What the world model reads: the state, then the action."""
    return tuple(tokenizer.encode(state + ACTION_LETTERS[action - 1]))


class ImaginationEpisode:
    """The model imagines the task's states one after the other; the reward is the share of them that is exact."""

    def __init__(self, task: ImaginationTask, sample_index: int, tokenizer: CharTokenizer) -> None:
        self.task, self.prompt_id, self.sample_index, self.tokenizer = task, task.prompt_id, sample_index, tokenizer
        self.predictions: list[tuple[int, ...]] = []

    def context(self) -> tuple[int, ...] | None:
        done = len(self.predictions)
        if done == len(self.task.actions):
            return None
        action_id = self.tokenizer.encode(ACTION_LETTERS[self.task.actions[done] - 1])
        before = self.predictions[-1] if done else self.tokenizer.encode(self.task.state)
        return (*before, *action_id)

    def receive(self, sample: Sample) -> None:
        self.predictions.append(sample.ids)

    def texts(self) -> list[str]:
        """The predicted states; a token that is no cell shows as '?', so that the length stays."""
        symbols = self.tokenizer.alphabet[: -len(ACTION_LETTERS)]
        first = self.tokenizer.vocab_size - len(self.tokenizer.alphabet)
        return [
            "".join(symbols[i - first] if 0 <= i - first < len(symbols) else "?" for i in ids)
            for ids in self.predictions
        ]

    def score(self) -> tuple[list[float], float | Invalid, dict]:
        exact = [float(text == truth) for text, truth in zip(self.texts(), self.task.truths, strict=False)]
        if len(exact) < len(self.task.truths):
            return exact, Invalid(f"only {len(exact)} of {len(self.task.truths)} states were imagined"), {}
        return exact, sum(exact) / len(exact), {}

    def picture(self, dynamics: GridDynamics) -> list[dict]:
        """The turns as the report shows them; of an episode that a fault ended, those before it."""
        before = [self.task.state, *self.texts()[:-1]]
        return [
            {
                "prompt": dynamics.grid(b),
                "action": ("Up", "Down", "Left", "Right")[a - 1],
                "prediction": dynamics.grid(p),
                "truth": dynamics.grid(t),
                "exact": p == t,
            }
            for b, a, p, t in zip(before, self.task.actions, self.texts(), self.task.truths, strict=False)
        ]
