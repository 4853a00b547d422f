"""What environments of questions to a world model have in common in their settings. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, kw_only=True)
class QuestionSettings:
    """Questions that a collect stage made: a state and an action, and a rule that judges what is said to change."""

    data: str  # the collect stage that makes the questions, or takes them from shards, and learns a tokenizer from them
    # folders of shards that hold questions already, such as converted public data or the reasoned answers of a teacher
    train: str | None = None
    test: str | None = None  # likewise, to evaluate on
    unseen: str | None = None  # likewise, questions of worlds that are not in train, evaluated on their own
    # rules adds instructions, and the rules of games; full also worked examples of games
    prompt: Literal["bare", "rules", "full"] = "bare"
    pad_prompts_to: int = 32
    # learn one even where the recipe has a start: the model then begins from fresh weights
    own_tokenizer: bool = False
    mode: Literal["faithful", "strict"] = "strict"  # faithful repeats the judge of the published work
    non_gold_ratio: float | None = 0.4  # rows without a changed object, for each with one; null takes all as they are
    unseen_n: int = 256  # questions of worlds never trained on that an evaluation asks at most
    making: ClassVar[tuple[str, ...]] = ("train", "test", "unseen", "prompt", "pad_prompts_to", "own_tokenizer")

    def __post_init__(self) -> None:
        if min(self.unseen_n, self.pad_prompts_to) <= 0:
            raise ValueError(f"unseen_n: {self.unseen_n} and pad_prompts_to: {self.pad_prompts_to} must be above 0")

    @property
    def in_shards(self) -> bool:
        """Whether the questions lie in shards already."""
        return any((self.train, self.test, self.unseen))
