"""Your own task: subclass `Environment`, name it in a recipe as `file.py:Name`, train. Importable without torch.

class Guess(Environment):
    def tasks(self, split):
        return [{"number": n} for n in (range(1, 90) if split == "train" else range(90, 100))]

    def play(self, task):
        answer = yield "I think of a number from 1 to 99. Guess."
        for _ in range(6):
            if answer.strip() == str(task["number"]):
                return 1.0
            answer = yield "No. Guess again."
        return 0.0
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..data.trajectory import Invalid

Split = Literal["train", "test"]
Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": text}
Prompt = str | list[Message]
Score = float | Mapping[str, float] | Invalid  # of a mapping, "reward" is trained on and the other numbers are reported


class Environment:
    """Gives tasks, plays them with the model, and judges what comes back.

    The same task and the same answers must lead to the same prompts and the same score: a resumed run plays episodes
    again.
    """

    def tasks(self, split: Split) -> Sequence[Any]:
        """The tasks of a split: any values that can be pickled. Both splits are asked for; "test" is never trained
        on.
        """
        raise NotImplementedError(f"{type(self).__name__}: write a method `tasks(self, split)`")

    def play(self, task: Any) -> Generator[Prompt, str, Score]:
        """One episode: `answer = yield prompt` for each turn, `return score` at the end.

        The first prompt may be a list of messages; later ones are what the user says next. A score is a number, a
        mapping with the key "reward", or `Invalid(reason)` where the machinery failed and nothing can be said of the
        model.
        """
        raise NotImplementedError(f"{type(self).__name__}: write a method `play(self, task)`")

    def demonstration(self, task: Any) -> str | list[str] | None:
        """The answer to imitate, or one answer a turn; None where there is none. Supervised fine-tuning reads it."""
        return None

    def baselines(self) -> Mapping[str, Callable[[Prompt, Any], str]]:
        """Trivial policies by name, each a function of prompt and task, that evaluations set beside the model."""
        return {}


@dataclass(frozen=True)
class End:
    """How an episode ended: its reward or Invalid, and the other numbers of its score."""

    reward: float | Invalid
    parts: dict[str, float] = field(default_factory=dict)
