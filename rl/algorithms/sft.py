"""Plain SFT on sampled trajectories: cross-entropy on what was sampled where the reward is high enough (rejection
sampling).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...data.packing import TrainSequence
from ...data.trajectory import Invalid, Trajectory
from ...kernels.policy import PolicySettings
from . import common
from .common import Gather, Scores
from .config import SFT


def settings(config: SFT, temperature: float) -> PolicySettings:
    """Imitation is at temperature 1, whatever the sampler's."""
    return PolicySettings()


def keep(config: SFT, trajectories: Sequence[Trajectory], gather: Gather) -> list[Trajectory]:
    """The trajectories that are good enough."""
    return [t for t in trajectories if not isinstance(t.reward, Invalid) and t.reward >= config.min_reward]


def prepare(config: SFT, trajectories: Sequence[Trajectory], scores: Scores, gather: Gather) -> list[TrainSequence]:
    """Mean cross-entropy over all sampled tokens."""
    total = float(max(sum(gather(common.action_tokens(trajectories))), 1))
    return [
        TrainSequence.of(s, i, ce=common.action_mask(s) * np.float32(1.0 / total)) for i, s in common.rows(trajectories)
    ]
