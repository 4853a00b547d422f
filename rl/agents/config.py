"""How an agent meets its world; importable without torch or numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

Format = Literal["answer", "think", "state"]
Variant = Literal["truth", "belief", "masked", "blanked", "random_coordinates"]


@dataclass(frozen=True)
class AgentSettings:
    """Shape of an episode: what is shown, what must be written, how long it lasts, and what is paid beside the world's reward."""

    fmt: Format = "think"  # answer, think, or state: with observation and prediction tags
    max_turns: int = 5
    actions_per_turn: int = 5
    window: int = 0  # above 0: only so many last turns are shown
    format_penalty: float = -0.1
    coordinates: bool = False  # states are shown and asked for with their coordinates (state estimation)
    prompt: Literal["full", "bare"] = "full"  # bare shows states alone, for models from scratch
    observation_reward: float = 0.0  # world-modelling online: paid for a written observation that is right, in a turn of right format
    prediction_reward: float = 0.0  # likewise for the predicted next state
    signed: ClassVar[tuple[str, ...]] = ("format_penalty", "observation_reward", "prediction_reward")

    def __post_init__(self) -> None:
        if min(self.max_turns, self.actions_per_turn) < 1 or self.window < 0:
            raise ValueError(f"max_turns: turns and actions per turn are at least 1, window at least 0, not {self}")
        if (self.observation_reward or self.prediction_reward) and self.fmt != "state":
            raise ValueError("observation_reward: paying for written states needs fmt = state, which has their tags")
