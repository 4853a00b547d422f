"""RLOO: REINFORCE whose baseline is the mean reward of the group's other samples."""

from __future__ import annotations

from collections.abc import Sequence

from ...data.packing import TrainSequence
from ...data.trajectory import Trajectory
from . import common
from .common import Gather, Scores
from .config import RLOO


def prepare(config: RLOO, trajectories: Sequence[Trajectory], scores: Scores, gather: Gather) -> list[TrainSequence]:
    """Reward less KL, against the other samples'; a sequence's log-prob is the sum of its tokens'."""
    rewards = common.with_kl_reward(config, trajectories, common.rewards_of(trajectories), scores)
    values = common.group_advantages("leave_one_out", trajectories, rewards, scores.device, gather)
    return common.weigh(config, trajectories, values, common.denominator(config, trajectories, gather), scores)
