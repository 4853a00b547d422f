"""`env: reasoning-gym:TASK`: generated questions of Reasoning Gym, with its own judges."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from ...core.errors import ConfigError
from ..environment import Environment, Prompt, Score, Split
from .common import require


class ReasoningGymEnvironment(Environment):
    """One question a task. The answer is judged within `<answer>` tags where it has them, else as a whole."""

    def __init__(
        self,
        id: str,
        seed: int = 0,
        train_tasks: int = 1000,
        test_tasks: int = 100,
        settings: dict[str, Any] | None = None,  # of the task, as reasoning_gym.create_dataset takes them
        instruction: str = "",  # said before the question
    ) -> None:
        gym, size = require("reasoning_gym"), train_tasks + test_tasks
        self.instruction = instruction
        try:
            self.data = gym.create_dataset(id, size=size, seed=seed, **(settings or {}))
            known = {self.data[i]["question"] for i in range(train_tasks)}
        except Exception as error:
            raise ConfigError(f"reasoning-gym:{id}: cannot be made: {type(error).__name__}: {error}") from error
        # One sequence cut in two: question i is drawn by seed + i, so a neighbouring seed would give the same questions
        # again.
        # small tasks repeat theirs
        held_out = [i for i in range(train_tasks, size) if self.data[i]["question"] not in known]
        if not held_out:
            raise ConfigError(
                f"reasoning-gym:{id}: all of its {test_tasks} held-out questions are among the {train_tasks} to train "
                "on"
            )
        self.places: dict[Split, list[int]] = {"train": list(range(train_tasks)), "test": held_out}

    def tasks(self, split: Split) -> Sequence[Any]:
        """Numbers of questions; a held-out one that is also trained on is left out."""
        return self.places[split]

    def play(self, task: Any) -> Generator[Prompt, str, Score]:
        """The question, and the score of the answer from 0 to 1."""
        entry = self.data[task]
        answer = yield "\n\n".join(part for part in (self.instruction, entry["question"]) if part)
        inner = answer.rpartition("<answer>")[2].partition("</answer>")[0] if "<answer>" in answer else answer
        return float(self.data.score_answer(inner.strip(), entry))

    def demonstration(self, task: Any) -> str | None:
        """The right answer, where the task has one."""
        answer = self.data[task]["answer"]
        return answer if isinstance(answer, str) and answer else None

    def baselines(self) -> Mapping[str, Callable[[Prompt, Any], str]]:
        """The right answer to another question, drawn at random."""

        def other(prompt: Prompt, task: Any) -> str:
            number = random.Random(f"{task}/{prompt}").choice(self.places["train"])
            return str(self.data[number]["answer"] or "")

        return {"random": other}
