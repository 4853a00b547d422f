"""Dr. GRPO: reward minus the group's mean, and a constant weight for every token whatever the answer's length."""

from __future__ import annotations

from collections.abc import Sequence

from ...data.packing import TrainSequence
from ...data.trajectory import Trajectory
from . import common
from .common import Gather, Scores
from .config import DrGRPO


def prepare(config: DrGRPO, trajectories: Sequence[Trajectory], scores: Scores, gather: Gather) -> list[TrainSequence]:
    """Token weight = 1 / (sequences of the step x length)."""
    rewards = common.with_kl_reward(config, trajectories, common.rewards_of(trajectories), scores)
    values = common.group_advantages("mean", trajectories, rewards, scores.device, gather)
    total = common.denominator(config, trajectories, gather) * config.length
    return common.weigh(config, trajectories, values, total, scores)
