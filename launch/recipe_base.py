"""What the stages of every kind of recipe share."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.config import OptimizerConfig
from ..rl.algorithms.config import Algorithm
from ..rl.rollout.config import Rollouts


def positive(**values: int | float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name}: {value} must be above 0")


@dataclass(frozen=True, kw_only=True)
class OnPolicy:
    """What every RL stage has, whatever its tasks are."""

    init: str  # the stage whose weights to start from
    algorithm: Algorithm
    prompts_per_step: int
    samples_per_prompt: int
    steps: int
    optimizer: OptimizerConfig
    temperature: float = 1.0
    drift_gate: float = 0.05  # mean |sampler - trainer log-prob| above which the run stops
    checkpoint_every: int = 10
    rollouts_every: int = 10  # keep a sample of trajectories for the report
    rollouts: Rollouts = field(default_factory=Rollouts)
    critic: OptimizerConfig | None = None  # of ppo and starpo-s

    def __post_init__(self) -> None:
        names = ("prompts_per_step", "steps", "temperature", "drift_gate", "checkpoint_every", "rollouts_every")
        positive(**{name: getattr(self, name) for name in names})
        if self.samples_per_prompt < 2:
            raise ValueError("samples_per_prompt: a group needs at least 2 samples")
