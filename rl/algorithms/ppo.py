"""PPO with a critic: GAE over sampled tokens, bi-level over turns where asked, and a clipped value loss.

Shape suffixes: N ids of all rows end to end, T positions of a packed batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ...core.batch import PackedBatch
from ...core.engine import Head, LossFn
from ...core.errors import ConfigError
from ...data.packing import TrainSequence
from ...data.trajectory import TokenSequence, Trajectory
from ...kernels.advantage import bilevel_gae, gae
from . import common
from .common import Gather, Scores
from .config import PPO


def turn_ends(sequence: TokenSequence) -> np.ndarray:
    """Numbers of the last token of every sampled span."""
    mask = common.action_mask(sequence) > 0
    return np.flatnonzero(mask & ~np.append(mask[1:], False))


def token_rewards(
    config: PPO, trajectories: Sequence[Trajectory], scores: Scores
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Reward of every token of every row, and where turns end. Turns count through a trajectory's rows in order."""
    rewards, ends = [], []
    turn_of: dict[int, int] = {}
    penalties = common.kl_penalties(config, trajectories, scores)
    for (index, sequence), penalty in zip(common.rows(trajectories), penalties, strict=True):
        trajectory, at = trajectories[index], turn_ends(sequence)
        value, end = -penalty, np.zeros(len(sequence.ids), bool)
        end[at] = True
        if config.turn_rewards:
            first = turn_of.get(index, 0)
            given = trajectory.turn_rewards[first : first + len(at)]
            if len(given) != len(at):
                raise ConfigError(
                    f"turn_rewards: the episode of prompt {trajectory.prompt_id} gave {len(trajectory.turn_rewards)} "
                    "rewards for more turns than that; the environment must give one a turn, or set turn_rewards: false"
                )
            value[at] += given
            turn_of[index] = first + len(at)
        elif len(at):
            value[at[-1]] += float(trajectory.reward)  # type: ignore[arg-type]
        rewards.append(value)
        ends.append(end)
    return rewards, ends


def advantages(
    config: PPO, trajectories: Sequence[Trajectory], scores: Scores
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(advantages, returns) of every row, before whitening."""
    if scores.values is None:
        raise ConfigError(
            "algorithm: ppo needs a critic; give the stage one, or choose an algorithm without (grpo, rloo, "
            "reinforce++)"
        )
    masks = [common.action_mask(s) > 0 for _, s in common.rows(trajectories)]
    if not masks:
        return [], []
    rewards, ends = token_rewards(config, trajectories, scores)
    lengths = [len(mask) for mask in masks]
    rewards_N, mask_N = common.join_rows(rewards, scores.device), common.join_rows(masks, scores.device)
    values_N = common.join_rows(scores.values, scores.device) * mask_N
    if config.bi_level:
        ends_N = common.join_rows(ends, scores.device)
        options = {"gamma": config.gamma, "lam": config.lam, "high_level_gamma": config.turn_gamma}
        estimated = bilevel_gae(rewards_N, values_N, mask_N, ends_N, lengths=lengths, **options)
    else:
        estimated = gae(rewards_N, values_N, mask_N, gamma=config.gamma, lam=config.lam, lengths=lengths)
    advantages, returns = (common.split_rows(x_N, lengths) for x_N in estimated)
    return advantages, returns


def prepare(config: PPO, trajectories: Sequence[Trajectory], scores: Scores, gather: Gather) -> list[TrainSequence]:
    """Policy and value terms of every row; the value loss is a mean over all sampled tokens."""
    values, targets = advantages(config, trajectories, scores)
    masks = [common.action_mask(s) for _, s in common.rows(trajectories)]
    if config.whiten:
        values = common.whiten(values, masks, gather)
    weighed = common.weigh(
        config, trajectories, values, common.denominator(config, trajectories, gather), scores, all_rows=True
    )
    tokens = float(max(sum(gather(common.action_tokens(trajectories))), 1))
    assert scores.values is not None
    return [
        replace(
            row,
            value=mask / np.float32(tokens),
            returns=target.astype(np.float32),
            old_value=(value * mask).astype(np.float32),
        )
        for row, mask, target, value in zip(weighed, masks, targets, scores.values, strict=True)
    ]


def value_loss(config: PPO) -> LossFn:
    """The critic's loss: half the squared error, the larger of plain and clipped around the old value."""

    def loss(hidden_TH: torch.Tensor, head: Head, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if head.values_T is None or batch.value_weight_T is None or batch.return_T is None or batch.old_value_T is None:
            raise ConfigError("critic: the model has no value head, or the batch no returns")
        values_T, weight_T = head.values_T.float(), batch.value_weight_T
        member_T = weight_T != 0
        near_T = batch.old_value_T + (values_T - batch.old_value_T).clamp(-config.value_clip, config.value_clip)
        plain_T, clipped_T = (values_T - batch.return_T).square(), (near_T - batch.return_T).square()
        error_T = torch.where(member_T, torch.maximum(plain_T, clipped_T), torch.zeros_like(plain_T))
        value = 0.5 * (weight_T * error_T).sum()
        detached = plain_T.detach() * member_T
        sums = {
            "value_loss": value.detach(),
            "value_clipped": ((clipped_T > plain_T) & member_T).sum(),
            "value_tokens": member_T.sum(),
            "value_error_sq": detached.sum(),
            "return": (batch.return_T * member_T).sum(),
            "return_sq": (batch.return_T.square() * member_T).sum(),
        }
        return value, sums

    return loss


def value_score(hidden_TH: torch.Tensor, head: Head, batch: PackedBatch) -> dict[str, torch.Tensor]:
    """A score for the engine: the critic's value before every target."""
    if head.values_T is None:
        raise ConfigError("critic: the model has no value head")
    return {"value": head.values_T.float()}


def explained_variance(sums: dict[str, float]) -> float:
    """1 - squared error / variance of the returns; 0 for a critic that knows nothing, NaN where returns vary by no more
    than their rounding does.
    """
    count = max(sums["value_tokens"], 1.0)
    square = sums["return_sq"] / count
    variance = square - (sums["return"] / count) ** 2
    return 1.0 - sums["value_error_sq"] / count / variance if variance > max(1e-12, 1e-6 * square) else float("nan")
