"""GRPO: advantages from groups of samples of one prompt, spread over the tokens the policy sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...data.packing import TrainSequence
from ...data.trajectory import Trajectory
from ...kernels.policy import PolicySettings
from . import common
from .common import Gather, Scores, action_tokens
from .config import GRPO

__all__ = ["action_tokens", "advantages", "prepare", "settings", "weigh"]


def settings(config: GRPO, temperature: float) -> PolicySettings:
    """The policy loss that goes with the algorithm."""
    return common.policy_settings(config, temperature)


def advantages(config: GRPO, trajectories: Sequence[Trajectory], scores: Scores | None = None) -> np.ndarray:
    """One advantage per trajectory; Invalid ones get 0 and enter no group's statistics."""
    rewards = common.rewards_of(trajectories)[0]
    if scores is not None:
        rewards = common.with_kl_reward(config, trajectories, rewards, scores)
    return common.group_advantages(config.scale, trajectories, rewards)


def weigh(config: GRPO, trajectories: Sequence[Trajectory], denominator: float) -> list[TrainSequence]:
    """Sequences with their weights. `denominator` is global: all sampled tokens, or all sequences, of the step on all ranks."""
    return common.weigh(config, trajectories, common.spread(trajectories, advantages(config, trajectories)), denominator)


def prepare(config: GRPO, trajectories: Sequence[Trajectory], scores: Scores, gather: Gather) -> list[TrainSequence]:
    """This rank's sequences with weights that make the sum over all ranks the loss."""
    values = common.spread(trajectories, advantages(config, trajectories, scores))
    return common.weigh(config, trajectories, values, common.denominator(config, trajectories, gather), scores)
