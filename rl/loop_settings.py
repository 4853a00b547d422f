"""The numbers of the RL loop that belong to no algorithm. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """How a rollout is made, cut into updates and watched."""

    microbatch_tokens: int
    drift_gate: float  # mean |sampler - trainer log-prob| above which the run stops
    seed: int
    kl_every: int = 0  # steps between two looks at the distance from the reference without a KL term; 0: none
    minibatches: int = 1  # optimizer steps that a rollout is cut into, whole groups each
    epochs: int = 1  # times that a rollout is gone through
    ahead: int = 0  # steps that rollouts may begin before they are trained on
    rollout_deadline_s: float = 3600.0
    max_invalid_share: float = 0.25  # of a step's samples that may be Invalid

    @property
    def updates(self) -> int:
        """Optimizer steps on one rollout."""
        return self.minibatches * self.epochs
