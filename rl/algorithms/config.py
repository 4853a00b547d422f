"""Settings of the algorithms; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class GRPO:
    """Group-relative policy optimisation: the advantage of a sample is its reward against its group's."""

    kind: Literal["grpo"] = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    scale: Literal["mean_std", "mean", "leave_one_out"] = "mean_std"  # "mean" is Dr. GRPO's
    aggregate: Literal["token", "sequence"] = "token"  # mean over all tokens, or over sequences of token means
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high", "kl_coef", "entropy_coef"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)} must not be negative")
