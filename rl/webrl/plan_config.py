"""How a planner looks ahead; importable without torch or numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WorldModelKind = Literal["none", "true", "corrupted", "model"]
ValueKind = Literal["progress", "critic", "sampled"]


@dataclass(frozen=True)
class PlanArm:
    """One way to act: sample actions, keep the commonest, imagine the page after each, value it, take the best.

    The defaults are those of WMA-Agents and RLVR-World. With `world: none` nothing is imagined and the commonest action
    is taken.
    """

    name: str
    samples: int = 20  # actions sampled in a state
    branching: int = 3  # of them, the commonest so many are looked at
    horizon: int = 1  # actions imagined one after the other
    # an exit among them ends the episode at once, or is valued like the others
    stop: Literal["at_once", "valued"] = "at_once"
    # true: the world by snapshot and restore; corrupted: the same, often wrong; model: a language model
    world: WorldModelKind = "none"
    wrong: float = 1.0  # corrupted: the share of pages that come from elsewhere
    model: str | None = None  # model: the stage that was trained on page changes
    max_new_tokens: int = 1024  # model: of a list of changes
    # progress knows the oracle's way; critic is a web-critic stage's; sampled asks the actor's model
    value: ValueKind = "progress"
    critic: str | None = None  # critic: the web-critic stage
    budget: int = 20  # sampled: answers whose scores are averaged
    control: bool = False  # the report marks it as one

    def __post_init__(self) -> None:
        for name in ("samples", "branching", "horizon", "max_new_tokens", "budget"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 1")
        if not 0 <= self.wrong <= 1:
            raise ValueError(f"wrong: {self.wrong} must be in [0, 1]")
        if (self.world == "model") != (self.model is not None):
            raise ValueError(
                f"model: arm '{self.name}': world: model needs the language stage, and no other world takes one"
            )
        if (self.value == "critic") != (self.critic is not None):
            raise ValueError(
                f"critic: arm '{self.name}': value: critic needs the web-critic stage, and no other value takes one"
            )
        if self.world == "model" and (self.horizon > 1 or self.value == "critic"):
            raise ValueError(
                f"horizon: arm '{self.name}': a language model predicts the accessibility tree, which neither actor "
                "nor critic reads; use horizon 1 with value: progress or sampled"
            )
