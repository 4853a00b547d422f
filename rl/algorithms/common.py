"""Shared by the algorithms: which tokens are trained, their weights, and statistics over all data-parallel ranks.

Per-token arrays are aligned with a sequence's ids. A step's valid sequences, in the order of their trajectories, are
its *rows*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...data.packing import TrainSequence, role_weight
from ...data.trajectory import Invalid, Role, TokenSequence, Trajectory
from ...kernels.advantage import group_advantage, spread_rows, variance_filter
from ...kernels.policy import PolicySettings
from .config import GRPO, Policy, StarPOS

Gather = Callable[[Any], list[Any]]  # every data-parallel rank's value


@dataclass(frozen=True)
class Scores:
    """Scores of every row by the models that the algorithm `needs`: one array per row, aligned with its ids.

    `device` is the trainer's: advantages are computed there.
    """

    reference: list[np.ndarray] | None = None  # log-probs of the frozen model
    policy: list[np.ndarray] | None = None  # log-probs recomputed by the trainer before the step
    values: list[np.ndarray] | None = None  # of the critic
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def policy_settings(config: Policy, temperature: float, *, ratio: str = "token") -> PolicySettings:
    """The policy loss that goes with the settings."""
    return PolicySettings(
        temperature=temperature,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        ratio=ratio,
        kl=config.kl_estimator,
        kl_clamp=config.kl_clamp,
    )


def is_valid(trajectory: Trajectory) -> bool:
    """Whether a trajectory is valid, that is, not lost to a fault."""
    return not isinstance(trajectory.reward, Invalid)


def rows(trajectories: Sequence[Trajectory]) -> list[tuple[int, TokenSequence]]:
    """The sequences to train on, each with the index of its trajectory."""
    return [(i, s) for i, t in enumerate(trajectories) if is_valid(t) for s in t.sequences]


def action_mask(sequence: TokenSequence) -> np.ndarray:
    """1.0 on sampled tokens."""
    return role_weight(sequence, Role.ACTION)


def action_tokens(trajectories: Sequence[Trajectory]) -> int:
    """The number of sampled tokens to train on."""
    return sum(s.roles.count(Role.ACTION) for _, s in rows(trajectories))


def rewards_of(trajectories: Sequence[Trajectory]) -> np.ndarray:
    """Rewards, 0 where Invalid."""
    return np.array([0.0 if isinstance(t.reward, Invalid) else float(t.reward) for t in trajectories], np.float64)


def most_varied(config: GRPO | StarPOS, trajectories: Sequence[Trajectory], gather: Gather) -> list[Trajectory]:
    """This rank's trajectories of the `keep` share of all ranks' groups with the largest std of rewards; at least
    one group.
    """
    if config.keep == 1:
        return list(trajectories)
    rewards = rewards_of(trajectories)
    parts = gather([(t.prompt_id, r, is_valid(t)) for t, r in zip(trajectories, rewards, strict=True)])
    everything = [row for part in parts for row in part]
    chosen = variance_filter(
        torch.tensor([r for _, r, _ in everything]),
        [prompt for prompt, _, _ in everything],
        keep=config.keep,
        valid_S=torch.tensor([v for _, _, v in everything]),
    )
    kept = {prompt for (prompt, _, _), hit in zip(everything, chosen.tolist(), strict=True) if hit}
    return [t for t in trajectories if t.prompt_id in kept]


def group_values(
    method: str, trajectories: Sequence[Trajectory], rewards: np.ndarray, device: torch.device, gather: Gather
) -> torch.Tensor:
    """One advantage per trajectory, relative to the others of its prompt. Invalid ones get 0 and are left out of the
    statistics.
    """
    valid = torch.tensor([is_valid(t) for t in trajectories], dtype=torch.bool)
    ids = torch.tensor([t.prompt_id for t in trajectories], dtype=torch.long)
    given = torch.tensor(rewards.tolist(), dtype=torch.float32).to(device)
    return group_advantage(given, ids, method=method, valid_S=valid, gather=gather)


def group_advantages(
    method: str, trajectories: Sequence[Trajectory], rewards: np.ndarray, device: torch.device, gather: Gather
) -> list[np.ndarray]:
    """The advantages of `group_values` as one constant array per row."""
    values = group_values(method, trajectories, rewards, device, gather)
    numbered = rows(trajectories)
    lengths = [len(s.ids) for _, s in numbered]
    return split_rows(spread_rows(values, [i for i, _ in numbered], lengths), lengths)


def join_rows(arrays: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    """Rows concatenated on the device where advantages are computed, in fp64 on a CPU and fp32 on a GPU."""
    joined = torch.from_numpy(np.concatenate(arrays))
    dtype = joined.dtype if joined.dtype == torch.bool else torch.float32 if device.type == "cuda" else torch.float64
    return joined.to(dtype).to(device)


def split_rows(values_N: torch.Tensor, lengths: Sequence[int]) -> list[np.ndarray]:
    """The rows of `join_rows`, back on the host."""
    return np.split(values_N.cpu().numpy(), np.cumsum(lengths)[:-1]) if lengths else []


def with_kl_reward(
    config: Policy, trajectories: Sequence[Trajectory], rewards: np.ndarray, scores: Scores
) -> np.ndarray:
    """Rewards minus the KL penalty of the whole trajectory, if the settings put it into the reward."""
    result = rewards.copy()
    for (index, _), penalty in zip(rows(trajectories), kl_penalties(config, trajectories, scores), strict=True):
        result[index] -= penalty.sum()
    return result


def kl_penalties(config: Policy, trajectories: Sequence[Trajectory], scores: Scores) -> list[np.ndarray]:
    """Per token of every row: coefficient x (log-prob - reference log-prob), 0 where nothing was sampled. All 0 unless
    the settings put the KL into the reward.
    """
    if not (config.kl_coef and config.kl_in == "reward"):
        return [np.zeros(len(s.ids)) for _, s in rows(trajectories)]
    assert scores.reference is not None, "kl_in = reward needs the reference's log-probs"
    pairs = zip(rows(trajectories), scores.reference, strict=True)
    return [config.kl_coef * action_mask(s) * (np.asarray(s.logprobs) - reference) for (_, s), reference in pairs]


def denominator(config: Policy, trajectories: Sequence[Trajectory], gather: Gather) -> float:
    """The divisor of the summed loss, over all ranks: sampled tokens, or sequences."""
    count = action_tokens(trajectories) if config.aggregate == "token" else len(rows(trajectories))
    return float(max(sum(gather(count)), 1))


def weigh(
    config: Policy,
    trajectories: Sequence[Trajectory],
    advantages: Sequence[np.ndarray],
    total: float,
    scores: Scores,
    *,
    all_rows: bool = False,
) -> list[TrainSequence]:
    """Rows with their weights. `advantages` holds one array per row; `total` is the global denominator.

    If only advantages give a gradient, rows without any are left out to save their forward pass.
    """
    result = []
    all_rows = all_rows or bool(config.entropy_coef) or bool(config.kl_coef and config.kl_in == "loss")
    for number, (index, sequence) in enumerate(rows(trajectories)):
        mask = action_mask(sequence)
        if not all_rows and not (advantages[number] * mask).any():
            continue
        share = 1.0 / total if config.aggregate != "sequence" else 1.0 / (total * max(mask.sum(), 1.0))
        sampled = np.asarray(sequence.logprobs, np.float32)
        arrays = {
            "pg": mask * np.float32(share),
            "advantage": np.asarray(advantages[number], np.float32),
            "old_logprob": sampled,
        }
        if config.tis_cap is not None:
            assert scores.policy is not None, "tis_cap needs the trainer's log-probs"
            arrays["old_logprob"] = scores.policy[number].astype(np.float32)
            arrays["pg"] = arrays["pg"] * importance(config, arrays["old_logprob"], sampled, mask) * mask
        if config.entropy_coef:
            arrays["entropy"] = mask * np.float32(share * config.entropy_coef)
        if config.kl_coef and config.kl_in == "loss":
            arrays["kl"] = mask * np.float32(share * config.kl_coef)
            if scores.reference is not None:
                arrays["ref_logprob"] = scores.reference[number].astype(np.float32)
        result.append(TrainSequence.of(sequence, index, **arrays))
    return result


def importance(config: Policy, policy: np.ndarray, sampler: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Importance weight of every token: the trainer's probability over the sampler's, of the token or of all sampled
    ones together; beyond the cap it is the cap, or 0.
    """
    assert config.tis_cap is not None
    ratio, cap = policy - sampler, np.log(config.tis_cap)
    if config.tis_per == "sequence":
        ratio = np.full_like(ratio, (ratio * mask).sum())
    weight = np.exp(np.minimum(ratio, cap)).astype(np.float32)
    return np.where(np.abs(ratio) > cap, np.float32(0), weight) if config.tis_beyond == "mask" else weight


def whiten(
    arrays: Sequence[np.ndarray], masks: Sequence[np.ndarray], gather: Gather, eps: float = 1e-8
) -> list[np.ndarray]:
    """Mean 0 and std 1 over the masked tokens of all ranks; 0 elsewhere."""
    joined = np.concatenate(
        [np.asarray(a, np.float64)[m > 0] for a, m in zip(arrays, masks, strict=True)] or [np.zeros(0)]
    )
    parts = gather((len(joined), float(joined.sum())))
    count = max(sum(n for n, _ in parts), 1)
    mean = sum(s for _, s in parts) / count
    spread_sum = sum(gather(float(((joined - mean) ** 2).sum())))
    std = (spread_sum / max(count - 1, 1)) ** 0.5
    return [
        ((np.asarray(a, np.float64) - mean) / (std + eps) * m).astype(np.float32)
        for a, m in zip(arrays, masks, strict=True)
    ]
