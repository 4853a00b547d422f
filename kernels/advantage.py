"""Advantages: group-relative (GRPO family), generalised advantage estimation, and its bi-level form for turns.

Shape suffixes: S samples, G groups, B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from .dispatch import use_triton

METHODS = ("identity", "mean", "mean_std", "leave_one_out", "uniform_std", "asym_clip")


def _group_index(group_ids: torch.Tensor | Sequence[Hashable] | None, samples: int) -> torch.Tensor:
    """Dense group numbers in order of first appearance for sequences, of value for tensors; None is one group."""
    if group_ids is None:
        return torch.zeros(samples, dtype=torch.long)
    if isinstance(group_ids, torch.Tensor):
        index = torch.unique(group_ids.cpu(), return_inverse=True)[1]
    else:
        seen: dict[Hashable, int] = {}
        index = torch.tensor([seen.setdefault(g, len(seen)) for g in group_ids], dtype=torch.long)
    if index.shape != (samples,):
        raise ValueError(f"group_ids has shape {tuple(index.shape)}, expected ({samples},)")
    return index


def _group_moments(rewards_S: torch.Tensor, index_S: torch.Tensor, valid_S: torch.Tensor):
    """(count, mean, unbiased std) per group over the valid samples; std is 0 for fewer than two."""
    groups = int(index_S.max()) + 1 if len(index_S) else 0
    kept = valid_S.to(rewards_S.dtype)
    value_S = torch.where(valid_S, rewards_S, torch.zeros_like(rewards_S))
    count_G = kept.new_zeros(groups).index_add(0, index_S, kept)
    mean_G = kept.new_zeros(groups).index_add(0, index_S, value_S) / count_G.clamp_min(1)
    centred_S = (value_S - mean_G[index_S]) * kept
    std_G = (kept.new_zeros(groups).index_add(0, index_S, centred_S.square()) / (count_G - 1).clamp_min(1)).sqrt()
    return count_G, mean_G, std_G


def _checked(rewards_S: torch.Tensor, valid_S: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    rewards_S = torch.as_tensor(rewards_S)
    valid_S = torch.ones(rewards_S.shape, dtype=torch.bool) if valid_S is None else torch.as_tensor(valid_S).bool().cpu()
    value_S = rewards_S.detach().double().cpu()
    bad = valid_S & ~value_S.isfinite()
    if bool(bad.any()):
        raise ValueError(f"reward {int(bad.nonzero()[0])} is {float(value_S[bad][0])}; mark failed samples in valid_S instead")
    return value_S, valid_S


def group_advantage(
    rewards_S: torch.Tensor,
    group_ids: torch.Tensor | Sequence[Hashable] | None,
    *,
    method: str = "mean_std",
    eps: float = 1e-6,
    valid_S: torch.Tensor | None = None,
    singleton: str = "zero",
) -> torch.Tensor:
    """Advantage of every sample relative to its group (a prompt, a tag, or with None the whole batch), fp32.

    Invalid samples take no part in the statistics and get 0. A group with one valid sample has no baseline: `singleton` gives
    0 (`zero`) or keeps its reward (`raw`, as published).
    """
    if method not in METHODS:
        raise ValueError(f"group_advantage method must be one of {', '.join(METHODS)}, not {method!r}")
    if singleton not in ("raw", "zero"):
        raise ValueError(f"singleton must be raw or zero, not {singleton!r}")
    device = rewards_S.device if isinstance(rewards_S, torch.Tensor) else torch.device("cpu")
    value_S, valid_S = _checked(rewards_S, valid_S)
    index_S = _group_index(group_ids, len(value_S))
    count_G, mean_G, std_G = _group_moments(value_S, index_S, valid_S)
    count_S, centred_S = count_G[index_S], value_S - mean_G[index_S]
    if method == "identity":
        result_S = value_S
    elif method == "mean":
        result_S = centred_S
    elif method == "leave_one_out":
        result_S = centred_S * count_S / (count_S - 1).clamp_min(1)
    elif method == "uniform_std":
        measured_G = count_G > 1
        scale = std_G[measured_G].mean() if bool(measured_G.any()) else torch.ones((), dtype=torch.float64)
        result_S = centred_S / (scale + eps)
    else:
        result_S = centred_S / (std_G[index_S] + eps)
        if method == "asym_clip":
            result_S = result_S.clamp(-1.0, 3.0)
    if method != "identity":
        alone = value_S if singleton == "raw" else torch.zeros_like(value_S)
        result_S = torch.where(count_S == 1, alone, result_S)
    return torch.where(valid_S, result_S, torch.zeros_like(result_S)).float().to(device)


def variance_filter(
    rewards_S: torch.Tensor,
    group_ids: torch.Tensor | Sequence[Hashable],
    *,
    keep: float = 1.0,
    reverse: bool = False,
    min_std: float | None = None,
    valid_S: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mask of the samples whose group is kept: the `keep` share of groups with the largest reward std (smallest if `reverse`),
    and of those only groups with std above `min_std`. Ties go to the earlier group. Pass raw rewards: normalised ones hide the variance.
    """
    if not 0 < keep <= 1:
        raise ValueError(f"variance_filter keep must be in (0, 1], not {keep}")
    value_S, valid_S = _checked(rewards_S, valid_S)
    index_S = _group_index(group_ids, len(value_S))
    _, _, std_G = _group_moments(value_S, index_S, valid_S)
    order_G = torch.argsort(std_G, descending=not reverse, stable=True)
    kept_G = torch.zeros(len(std_G), dtype=torch.bool)
    kept_G[order_G[: int(keep * len(std_G))]] = True
    if min_std is not None:
        kept_G &= std_G > min_std
    return kept_G[index_S] & valid_S


def _rows(rewards, values, mask):
    if rewards.shape != values.shape or rewards.shape != mask.shape or rewards.dim() != 2:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, values {tuple(values.shape)} and mask {tuple(mask.shape)} must be one [B, T] shape"
        )
    mask = mask.bool()
    if not rewards.is_cuda and bool((rewards[~mask] != 0).any()):
        raise ValueError("a reward lies on a masked token and would be lost; move it to the last token of the turn")
    return mask


def reference_gae(rewards_BT, values_BT, mask_BT, *, gamma, lam, bootstrap_B=None, reset_BT=None):
    """The recursion as a loop over tokens; a reset token is the last of its own segment."""
    advantage_BT = torch.zeros_like(values_BT)
    carry_B = torch.zeros_like(values_BT[:, 0])
    next_B = carry_B if bootstrap_B is None else bootstrap_B.to(values_BT.dtype)
    for t in range(values_BT.shape[1] - 1, -1, -1):
        on_B = mask_BT[:, t]
        if reset_BT is not None:
            carry_B = torch.where(reset_BT[:, t], torch.zeros_like(carry_B), carry_B)
            next_B = torch.where(reset_BT[:, t], torch.zeros_like(next_B), next_B)
        delta_B = rewards_BT[:, t] + gamma * next_B - values_BT[:, t]
        carry_B = torch.where(on_B, delta_B + gamma * lam * carry_B, carry_B)
        next_B = torch.where(on_B, values_BT[:, t], next_B)
        advantage_BT[:, t] = torch.where(on_B, carry_B, torch.zeros_like(carry_B))
    return advantage_BT, torch.where(mask_BT, advantage_BT + values_BT, torch.zeros_like(values_BT))


def gae(
    rewards_BT: torch.Tensor,
    values_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns) over the tokens of `mask_BT`; masked tokens (prompts, observations) pass the carry through and get 0.

    `bootstrap_B` is the value after the last token, for truncated episodes.
    """
    mask_BT = _rows(rewards_BT, values_BT, mask_BT)
    if use_triton(values_BT):
        from .advantage_triton import triton_gae

        return triton_gae(rewards_BT, values_BT, mask_BT, gamma=gamma, lam=lam, bootstrap_B=bootstrap_B)
    return reference_gae(rewards_BT, values_BT, mask_BT, gamma=gamma, lam=lam, bootstrap_B=bootstrap_B)


def bilevel_gae(
    rewards_BT: torch.Tensor,
    values_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    turn_end_BT: torch.Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    high_level_gamma: float = 0.95,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns): GAE over turn ends first, whose result becomes each turn's reward for GAE over its tokens.

    Without `turn_end_BT` every token with a reward is a turn end (as published), which overlooks turns whose reward is exactly 0.
    """
    mask_BT = _rows(rewards_BT, values_BT, mask_BT)
    end_BT = (rewards_BT != 0) if turn_end_BT is None else turn_end_BT.bool()
    end_BT = end_BT & mask_BT
    if turn_end_BT is not None and not rewards_BT.is_cuda and bool((rewards_BT[~end_BT] != 0).any()):
        raise ValueError("a reward lies on a token that turn_end_BT does not mark")
    zero_BT = torch.zeros_like(rewards_BT)
    _, target_BT = reference_or_triton_gae(torch.where(end_BT, rewards_BT, zero_BT), values_BT, end_BT, high_level_gamma, lam, None)
    return reference_or_triton_gae(torch.where(end_BT, target_BT, zero_BT), values_BT, mask_BT, gamma, lam, end_BT)


def reference_or_triton_gae(rewards_BT, values_BT, mask_BT, gamma, lam, reset_BT):
    if use_triton(values_BT):
        from .advantage_triton import triton_gae

        return triton_gae(rewards_BT, values_BT, mask_BT, gamma=gamma, lam=lam, reset_BT=reset_BT)
    return reference_gae(rewards_BT, values_BT, mask_BT, gamma=gamma, lam=lam, reset_BT=reset_BT)
