"""GRPO: advantages from groups of samples of one prompt, spread over the tokens the policy sampled."""

from __future__ import annotations

from collections.abc import Sequence

from ...data.packing import TrainSequence
from ...data.trajectory import Trajectory
from . import common
from .common import Gather, Scores
from .common import most_varied as keep
from .config import GRPO

__all__ = ["keep", "prepare"]


def prepare(config: GRPO, trajectories: Sequence[Trajectory], scores: Scores, gather: Gather) -> list[TrainSequence]:
    """This rank's sequences with weights that make the sum over all ranks the loss."""
    rewards = common.with_kl_reward(config, trajectories, common.rewards_of(trajectories), scores)
    values = common.group_advantages(config.scale, trajectories, rewards, scores.device, gather)
    return common.weigh(config, trajectories, values, common.denominator(config, trajectories, gather), scores)
