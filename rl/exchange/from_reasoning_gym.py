"""`env: reasoning-gym:TASK`: generated questions of Reasoning Gym, with its own judges."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from ...core.errors import ConfigError
from ..environment import Environment, Prompt, Score, Split
from .texts import require

HELD_OUT = 1  # added to the seed of the held-out questions


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
        gym = require("reasoning_gym")
        self.instruction, sizes = instruction, {"train": train_tasks, "test": test_tasks}
        try:
            made = {
                split: gym.create_dataset(id, size=size, seed=2 * seed + HELD_OUT * (split == "test"), **(settings or {}))
                for split, size in sizes.items()
            }
        except Exception as error:
            raise ConfigError(f"reasoning-gym:{id}: cannot be made: {type(error).__name__}: {error}") from error
        self.sets: dict[str, Any] = made
        known = {entry["question"] for entry in made["train"]}
        self.places = {  # small tasks repeat their questions; one that is trained on is no test
            "train": list(range(train_tasks)),
            "test": [i for i, entry in enumerate(made["test"]) if entry["question"] not in known],
        }
        if not self.places["test"]:
            raise ConfigError(f"reasoning-gym:{id}: all of its {test_tasks} held-out questions are among the {train_tasks} to train on")

    def tasks(self, split: Split) -> Sequence[Any]:
        """Numbers of questions; a held-out one that is also trained on is left out."""
        return [{"split": split, "number": i} for i in self.places[split]]

    def _entry(self, task: Any) -> Any:
        return self.sets[task["split"]][task["number"]]

    def play(self, task: Any) -> Generator[Prompt, str, Score]:
        """The question, and the score of the answer from 0 to 1."""
        entry = self._entry(task)
        answer = yield "\n\n".join(part for part in (self.instruction, entry["question"]) if part)
        inner = answer.rpartition("<answer>")[2].partition("</answer>")[0] if "<answer>" in answer else answer
        return float(self.sets[task["split"]].score_answer(inner.strip(), entry))

    def demonstration(self, task: Any) -> str | None:
        """The right answer, where the task has one."""
        answer = self._entry(task)["answer"]
        return answer if isinstance(answer, str) and answer else None

    def baselines(self) -> Mapping[str, Callable[[Prompt, Any], str]]:
        """The right answer to another question, drawn at random."""

        def other(prompt: Prompt, task: Any) -> str:
            number = random.Random(f"{task}/{prompt}").choice(self.places["train"])
            return str(self.sets["train"][number]["answer"] or "")

        return {"random": other}
