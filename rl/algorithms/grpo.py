"""GRPO: advantages from groups of samples of one prompt, spread over the tokens the policy sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...data.packing import TrainSequence, role_weight
from ...data.trajectory import Invalid, Role, Trajectory
from ...kernels.advantage import group_advantage
from ...kernels.policy_loss import PolicySettings
from .config import GRPO


def settings(config: GRPO, temperature: float) -> PolicySettings:
    """The policy loss that goes with the algorithm."""
    return PolicySettings(temperature=temperature, clip_low=config.clip_low, clip_high=config.clip_high)


def advantages(config: GRPO, trajectories: Sequence[Trajectory]) -> np.ndarray:
    """One advantage per trajectory; Invalid ones get 0 and enter no group's statistics."""
    valid = [not isinstance(t.reward, Invalid) for t in trajectories]
    rewards = [0.0 if isinstance(t.reward, Invalid) else float(t.reward) for t in trajectories]
    values = group_advantage(
        torch.tensor(rewards),
        torch.tensor([t.prompt_id for t in trajectories]),
        method=config.scale,
        valid_S=torch.tensor(valid),
    )
    return values.numpy().astype(np.float32)


def action_tokens(trajectories: Sequence[Trajectory]) -> int:
    """How many sampled tokens will be trained on."""
    return sum(sum(r == Role.ACTION for r in s.roles) for t in trajectories if not isinstance(t.reward, Invalid) for s in t.sequences)


def weigh(config: GRPO, trajectories: Sequence[Trajectory], denominator: float) -> list[TrainSequence]:
    """Sequences with their weights. `denominator` is global: all sampled tokens, or all sequences, of the step on all ranks.

    Where only the advantage makes a gradient, sequences without one are left out: they would cost a forward and give nothing.
    """
    rows = []
    needs_all = bool(config.kl_coef or config.entropy_coef)
    for trajectory, advantage in zip(trajectories, advantages(config, trajectories), strict=True):
        if isinstance(trajectory.reward, Invalid) or not (advantage or needs_all):
            continue
        for sequence in trajectory.sequences:
            mask = role_weight(sequence, Role.ACTION)
            share = 1.0 / denominator if config.aggregate == "token" else 1.0 / (denominator * max(mask.sum(), 1.0))
            arrays = {
                "pg": mask * np.float32(share),
                "advantage": np.full(len(mask), advantage, np.float32),
                "old_logprob": np.asarray(sequence.logprobs, np.float32),
            }
            if config.entropy_coef:
                arrays["entropy"] = mask * np.float32(share * config.entropy_coef)
            if config.kl_coef:
                arrays["kl"] = mask * np.float32(share * config.kl_coef)
            rows.append(TrainSequence.of(sequence, **arrays))
    return rows
