"""Settings of planning with a world model of web sites. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ...rl.rollout.config import Rollouts
from ...rl.webrl.plan_config import PlanArm
from .base import positive


@dataclass(frozen=True)
class WebPlan:
    """An actor on held-out tasks with and without a world model to plan with, by arms, beside the random policy and
    the oracle.
    """

    kind: Literal["web-plan"]
    name: str
    actor: str  # the stage whose model acts
    arms: list[PlanArm]  # the ways to act that are compared
    max_new_tokens: int  # of one action
    n: int = 0  # tasks of the test split, 0 for all
    temperature: float = 1.0
    top_p: float = 0.95  # share of probability to sample actions from
    headline: str | None = None  # the arm that is compared with every other one, over the same tasks
    rollouts: Rollouts = field(default_factory=Rollouts)
    uses: ClassVar[tuple[str, ...]] = ("actor", "models")

    def __post_init__(self) -> None:
        positive(self, "max_new_tokens", "temperature")
        names = [arm.name for arm in self.arms]
        if not names or len(set(names)) != len(names):
            raise ValueError("arms: at least one is needed, and every name only once")
        if self.headline is not None and self.headline not in names:
            raise ValueError(f"headline: '{self.headline}' is no arm ({', '.join(names)})")

    @property
    def models(self) -> list[str]:
        """The stages whose models the arms ask."""
        return [name for arm in self.arms for name in (arm.model, arm.critic) if name]
