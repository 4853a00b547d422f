"""GSPO: the importance ratio and its clip belong to the sequence; every sequence weighs the same."""

from __future__ import annotations

from collections.abc import Sequence

from ...data.packing import TrainSequence
from ...data.trajectory import Trajectory
from ...kernels.policy import PolicySettings
from . import common
from .common import Gather, Scores
from .config import GSPO


def settings(config: GSPO, temperature: float) -> PolicySettings:
    """The policy loss that goes with the algorithm."""
    return common.policy_settings(config, temperature, ratio="sequence")


def prepare(config: GSPO, trajectories: Sequence[Trajectory], scores: Scores, gather: Gather) -> list[TrainSequence]:
    """GRPO's advantages; the tokens' weights of a sequence add up to 1 / sequences."""
    rewards = common.with_kl_reward(config, trajectories, common.rewards_of(trajectories), scores)
    values = common.group_advantages("mean_std", trajectories, rewards, scores.device, gather)
    return common.weigh(config, trajectories, values, common.denominator(config, trajectories, gather), scores)
