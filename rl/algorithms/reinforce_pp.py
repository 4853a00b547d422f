"""REINFORCE++: discounted returns with a KL penalty at every token, normalised over the tokens of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...data.packing import TrainSequence
from ...data.trajectory import Trajectory
from ...kernels.advantage import gae
from . import common
from .common import Gather, Scores
from .config import ReinforcePP


def returns(
    config: ReinforcePP, trajectories: Sequence[Trajectory], scores: Scores, gather: Gather
) -> list[np.ndarray]:
    """Return of every sampled token of every row: later rewards less penalties, discounted over sampled tokens.

    The trajectory's reward stands at the last sampled token of each of its rows: with a windowed context a row is one
    turn.
    """
    rewards = common.rewards_of(trajectories)
    if config.group_baseline:
        rewards = common.group_values("mean", trajectories, rewards, scores.device, gather).cpu().numpy()
    rows = common.rows(trajectories)
    if not rows:
        return []
    masks = [common.action_mask(s) > 0 for _, s in rows]
    given = [-penalty for penalty in common.kl_penalties(config, trajectories, scores)]
    for (index, _), value, mask in zip(rows, given, masks, strict=True):
        value[np.flatnonzero(mask)[-1:]] += float(rewards[index])
    rewards_N, mask_N = common.join_rows(given, scores.device), common.join_rows(masks, scores.device)
    lengths = [len(mask) for mask in masks]
    values_N, _ = gae(rewards_N, torch.zeros_like(rewards_N), mask_N, gamma=config.gamma, lam=1.0, lengths=lengths)
    return common.split_rows(values_N, lengths)


def prepare(
    config: ReinforcePP, trajectories: Sequence[Trajectory], scores: Scores, gather: Gather
) -> list[TrainSequence]:
    """Whitened returns as advantages."""
    masks = [common.action_mask(s) for _, s in common.rows(trajectories)]
    values = common.whiten(returns(config, trajectories, scores, gather), masks, gather)
    return common.weigh(config, trajectories, values, common.denominator(config, trajectories, gather), scores)
