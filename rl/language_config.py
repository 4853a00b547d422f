"""What environments of questions to a world model have in common in their settings. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class QuestionSettings:
    """Questions that an earlier stage made: a state and an action, and a rule that judges what is said to change."""

    data: str  # the stage whose questions are asked
    mode: Literal["faithful", "strict"] = "strict"  # faithful repeats the judge of the published work
    non_gold_ratio: float | None = 0.4  # rows without a changed object, for each with one; null takes all as they are
    unseen_n: int = 256  # questions of worlds never trained on that an evaluation asks at most

    def __post_init__(self) -> None:
        if self.unseen_n <= 0:
            raise ValueError(f"unseen_n: {self.unseen_n} must be above 0")
