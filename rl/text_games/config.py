"""Settings of text games as an environment. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..language_config import QuestionSettings


@dataclass(frozen=True, kw_only=True)
class TextGameEnvironment(QuestionSettings):
    """A world model of text games: state and action in, the difference to the next state out."""

    kind: Literal["text-game"]
    reward: Literal["binary", "task_specific"] = "binary"
    drift_steps: int = 0  # evaluations: so many steps are imagined one after the other, beside the true game
    drift_episodes: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drift_steps < 0 or self.drift_episodes <= 0:
            raise ValueError("drift_steps: 0 or more, and drift_episodes above 0")
