"""Settings of the RL loop that belong to no algorithm. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """How a rollout is made, cut into updates and watched."""

    microbatch_tokens: int
    drift_gate: float  # mean |sampler - trainer log-prob| above which the run stops
    seed: int
    kl_every: int = 0  # steps between measurements of the KL to the reference, without a KL term; 0: none
    minibatches: int = 1  # optimizer steps per rollout, each on whole groups
    epochs: int = 1  # passes over a rollout
    ahead: int = 0  # how many steps before their training rollouts may start
    rollout_deadline_s: float = 3600.0
    max_invalid_share: float = 0.25  # share of a step's samples that may be Invalid

    @property
    def updates(self) -> int:
        """Optimizer steps on one rollout."""
        return self.minibatches * self.epochs
