"""What the environments from elsewhere share: seeds as tasks, observations as texts, and a random policy over the
actions.

An observation that is too large for a prompt is a fault of the environment, so its episode becomes Invalid.
"""

from __future__ import annotations

import importlib
import json
import math
import random
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.by_path import load_object
from ...core.errors import ConfigError, missing_extra
from ..environment import Environment, Prompt, Score, Split

LONGEST = 100_000  # characters of one observation
MOST_NUMBERS = 256  # of an array that is written out
COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
TEST_SEEDS = 1_000_000  # the first seed of the held-out tasks


def require(package: str) -> Any:
    """A package of the extra `worlds`; where it is not installed, the error says what to install."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise missing_extra(error) or ConfigError(f"{package}: cannot be imported: {error}") from error


def text_of(observation: Any) -> str:
    """An observation as text: a text as it is, numbers rounded to 4 digits, sections as JSON."""
    text = observation if isinstance(observation, str) else json.dumps(_plain(observation), ensure_ascii=False)
    if len(text) > LONGEST:
        raise ValueError(f"an observation of {len(text):,} characters; at most {LONGEST:,} fit a prompt")
    return COLOURS.sub("", text)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if hasattr(value, "shape") and hasattr(value, "tolist"):  # of numpy
        if value.size > MOST_NUMBERS:
            hint = "name a renderer of text: renderer: file.py:function, or render: ansi"
            raise ValueError(f"an observation of {value.size} numbers, at most {MOST_NUMBERS} are written out; {hint}")
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else str(value)
    return value if isinstance(value, str | int | bool) or value is None else str(value)


def renderer_of(path: str | None) -> Callable[[Any], str]:
    """How an observation becomes text: a function of the user's, or `text_of`."""
    if path is None:
        return text_of
    function = load_object(path, Path())
    return lambda observation: text_of(function(observation))


class Seeded(Environment):
    """An environment whose tasks are seeds, played for at most `max_actions` actions. The reward is the sum of those
    of the steps.
    """

    def __init__(
        self, max_actions: int = 20, train_tasks: int = 1024, test_tasks: int = 64, instruction: str = ""
    ) -> None:
        if min(max_actions, train_tasks, test_tasks) < 1:
            raise ConfigError("max_actions, train_tasks and test_tasks: at least 1")
        self.max_actions, self.instruction = max_actions, instruction
        self.sizes = {"train": train_tasks, "test": test_tasks}

    def tasks(self, split: Split) -> Sequence[Any]:
        """Seeds; those of the held-out tasks are others."""
        first = TEST_SEEDS if split == "test" else 0
        return [{"seed": first + i} for i in range(self.sizes[split])]

    def begin(self, seed: int) -> tuple[Any, str]:
        """An episode of this seed, and what is seen first."""
        raise NotImplementedError

    def act(self, episode: Any, answer: str) -> tuple[str, float, bool]:
        """What an answer leads to: the text that is seen, the reward, and whether it is over. ValueError where it is
        no action.
        """
        raise NotImplementedError

    def end(self, episode: Any) -> None:
        """Give back what an episode holds."""

    def how(self) -> str:
        """How an action is written, for the prompt."""
        raise NotImplementedError

    def random_answer(self, rng: random.Random) -> str:
        """An action, without looking."""
        raise NotImplementedError

    def play(self, task: Any) -> Generator[Prompt, str, Score]:
        """Every prompt says what is seen and how many actions are left; an answer that is no action costs one of
        them.
        """
        episode, seen = self.begin(task["seed"])
        try:
            total, wrong, over, steps = 0.0, 0, False, 0
            said = "\n".join(part for part in (self.instruction, self.how(), seen) if part)
            while not over and steps < self.max_actions:
                answer = yield f"{said}\n{self.max_actions - steps} actions left."
                steps += 1
                try:
                    action = self.read(answer)
                except ValueError as error:
                    wrong, said = wrong + 1, f"{error}. {self.how()}"
                    continue
                said, reward, over = self.act(episode, action)
                total += reward
            return {"reward": total, "actions": steps, "not_an_action": wrong / steps, "ended": float(over)}
        finally:
            self.end(episode)

    def read(self, answer: str) -> Any:
        """An answer as an action; ValueError, with the reason, where it is none."""
        return answer

    def baselines(self) -> Mapping[str, Callable[[Prompt, Any], str]]:
        """Random play. What it does depends on the task and on what was said, so that a resumed run repeats it."""
        return {"random": lambda prompt, task: self.random_answer(random.Random(f"{task}/{prompt}"))}


def one_of(words: Sequence[str]) -> str:
    """How an action that is one of these words is written; of very many the first."""
    return f"Answer with one of: {', '.join(words[:64])}{', ...' if len(words) > 64 else ''}."


def last_line(answer: str) -> str:
    """What a model means: the inside of the last `<answer>`, else its last line that is not empty."""
    tagged = re.findall(r"<answer>(.*?)</answer>", answer, re.DOTALL)
    lines = (tagged[-1] if tagged else answer).strip().splitlines()
    return lines[-1].strip() if lines else ""
