"""Settings of the evaluation of agents in worlds, by arms. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ...rl.agents.config import WorldsEnvironment
from ...rl.rollout.config import SamplerConfig
from .base import positive


@dataclass(frozen=True)
class Arm:
    """A model as it is evaluated and compared."""

    name: str
    model: str
    env: WorldsEnvironment | None = None  # how it meets its world; default: as in the stage that made the model
    control: bool = False  # the report marks it as one


@dataclass(frozen=True)
class AgentEvaluate:
    """Agents on held-out seeds beside the random policy and the ceiling: Pass@1, Pass@k, what turns did, perplexity of states."""

    kind: Literal["agent-eval"]
    name: str
    arms: list[Arm]
    max_new_tokens: int
    tags: list[str] = field(default_factory=list)  # one table each; without any those of the recipe's environment
    groups: int = 128
    samples_per_group: int = 8
    first_seed: int = 123
    temperature: float = 1.0
    greedy: bool = False  # also play every seed once without chance, in a column of its own
    headline: str | None = None  # the arm that is compared with every other one, over the same seeds
    sampler: SamplerConfig | None = None  # default: that of the recipe's first RL stage
    uses: ClassVar[tuple[str, ...]] = ("models",)

    def __post_init__(self) -> None:
        positive(self, "groups", "samples_per_group", "max_new_tokens")
        names = [arm.name for arm in self.arms]
        if self.headline is not None and self.headline not in names:
            raise ValueError(f"headline: '{self.headline}' is no arm ({', '.join(names)})")

    @property
    def models(self) -> list[str]:
        return [arm.model for arm in self.arms]
