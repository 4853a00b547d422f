"""REINFORCE++: discounted returns with a KL penalty at every token, normalised over the tokens of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...data.packing import TrainSequence
from ...data.trajectory import Trajectory
from ...kernels.policy import PolicySettings
from . import common
from .common import Gather, Scores
from .config import ReinforcePP


def settings(config: ReinforcePP, temperature: float) -> PolicySettings:
    """The policy loss that goes with the algorithm."""
    return common.policy_settings(config, temperature)


def returns(config: ReinforcePP, trajectories: Sequence[Trajectory], scores: Scores) -> list[np.ndarray]:
    """Return of every sampled token of every row: later rewards less penalties, discounted over sampled tokens.

    The trajectory's reward stands at the last sampled token of each of its rows: with a windowed context a row is one turn.
    """
    rewards, _ = common.rewards_of(trajectories)
    if config.group_baseline:
        rewards = common.group_advantages("mean", trajectories, rewards).astype(np.float64)
    rows = common.rows(trajectories)
    in_reward = bool(config.kl_coef) and config.kl_in == "reward"
    penalties = common.kl_penalties(config, trajectories, scores) if in_reward else [np.zeros(len(s.ids)) for _, s in rows]
    result = []
    for (index, sequence), penalty in zip(rows, penalties, strict=True):
        value, later = np.zeros(len(sequence.ids)), rewards[index]
        for at in np.flatnonzero(common.action_mask(sequence))[::-1]:
            later = later - penalty[at]
            value[at] = later
            later *= config.gamma
        result.append(value)
    return result


def prepare(config: ReinforcePP, trajectories: Sequence[Trajectory], scores: Scores, gather: Gather) -> list[TrainSequence]:
    """Whitened returns as advantages."""
    masks = [common.action_mask(s) for _, s in common.rows(trajectories)]
    values = common.whiten(returns(config, trajectories, scores), masks, gather)
    return common.weigh(config, trajectories, values, common.denominator(config, trajectories, gather), scores)
