"""Advantages: group-relative (GRPO family), generalised advantage estimation, and its bi-level form for turns.

Shape suffixes: S samples, G groups, B rows of T tokens each, R rows of any length laid end to end in N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from .dispatch import use_triton
from .group_std import EPS, mean_group_std

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
    valid_S = (
        torch.ones(rewards_S.shape, dtype=torch.bool) if valid_S is None else torch.as_tensor(valid_S).bool().cpu()
    )
    value_S = rewards_S.detach().double().cpu()
    bad = valid_S & ~value_S.isfinite()
    if bool(bad.any()):
        raise ValueError(
            f"reward {int(bad.nonzero()[0])} is {float(value_S[bad][0])}; mark failed samples in valid_S instead"
        )
    return value_S, valid_S


def group_advantage(
    rewards_S: torch.Tensor,
    group_ids: torch.Tensor | Sequence[Hashable] | None,
    *,
    method: str = "mean_std",
    valid_S: torch.Tensor | None = None,
    gather: Callable[[Any], list[Any]] = lambda value: [value],
) -> torch.Tensor:
    """Advantage of every sample relative to its group (a prompt, a tag, or with None the whole batch), fp32.

    Invalid samples take no part in the statistics and get 0. A group with one valid sample has no baseline: it gets 0.
    A group lies on one rank; `gather` returns every rank's value, for the scale of `uniform_std`. On a GPU a reward
    that is not finite makes its group NaN, where a CPU raises.
    """
    if method not in METHODS:
        raise ValueError(f"group_advantage method must be one of {', '.join(METHODS)}, not {method!r}")
    rewards_S = torch.as_tensor(rewards_S)
    index_S = _group_index(group_ids, len(rewards_S))
    if use_triton(rewards_S):
        from .triton.advantage import triton_group_advantage

        return triton_group_advantage(rewards_S, index_S, valid_S, method=method, gather=gather)
    device = rewards_S.device
    value_S, valid_S = _checked(rewards_S, valid_S)
    count_G, mean_G, std_G = _group_moments(value_S, index_S, valid_S)
    count_S, centred_S = count_G[index_S], value_S - mean_G[index_S]
    if method == "identity":
        result_S = value_S
    elif method == "mean":
        result_S = centred_S
    elif method == "leave_one_out":
        result_S = centred_S * count_S / (count_S - 1).clamp_min(1)
    elif method == "uniform_std":
        result_S = centred_S / (mean_group_std(std_G, count_G > 1, gather) + EPS)
    else:
        result_S = centred_S / (std_G[index_S] + EPS)
        if method == "asym_clip":
            result_S = result_S.clamp(-1.0, 3.0)
    if method != "identity":
        result_S = torch.where(count_S == 1, torch.zeros_like(value_S), result_S)
    return torch.where(valid_S, result_S, torch.zeros_like(result_S)).float().to(device)


def spread_rows(values_S: torch.Tensor, sample_R: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Each row's tokens filled with the value of its sample; rows of these `lengths` lie end to end."""
    if use_triton(values_S):
        from .triton.advantage import triton_spread_rows

        return triton_spread_rows(values_S, sample_R, lengths)
    chosen_R = values_S[torch.tensor(sample_R, dtype=torch.long, device=values_S.device)]
    return chosen_R.repeat_interleave(torch.tensor(lengths, dtype=torch.long, device=values_S.device))


def variance_filter(
    rewards_S: torch.Tensor,
    group_ids: torch.Tensor | Sequence[Hashable],
    *,
    keep: float,
    valid_S: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mask of the samples whose group is kept: the `keep` share of groups with the largest reward std, at least one.
    Ties go to the earlier group. Pass raw rewards: normalised ones hide the variance.
    """
    if not 0 < keep <= 1:
        raise ValueError(f"variance_filter keep must be in (0, 1], not {keep}")
    value_S, valid_S = _checked(rewards_S, valid_S)
    index_S = _group_index(group_ids, len(value_S))
    _, _, std_G = _group_moments(value_S, index_S, valid_S)
    valid_G = torch.zeros(len(std_G), dtype=torch.bool).index_fill_(0, index_S[valid_S], True)
    order_G = torch.argsort(torch.where(valid_G, std_G, -1.0), descending=True, stable=True)
    kept_G = torch.zeros(len(std_G), dtype=torch.bool)
    kept_G[order_G[: max(1, int(keep * len(std_G) + 1e-9))]] = True  # 0.29 of 100 groups are 29
    return kept_G[index_S] & valid_S


def _checked_rows(rewards, values, mask, lengths):
    if rewards.shape != values.shape or rewards.shape != mask.shape or rewards.dim() != (2 if lengths is None else 1):
        expected = "one [B, T] shape" if lengths is None else "flat, as lengths are given"
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, values {tuple(values.shape)} and mask {tuple(mask.shape)} must be "
            f"{expected}"
        )
    if lengths is not None and sum(lengths) != len(rewards):
        raise ValueError(f"lengths add up to {sum(lengths)} for {len(rewards)} tokens")
    mask = mask.bool()
    if not rewards.is_cuda and bool((rewards[~mask] != 0).any()):
        raise ValueError("a reward lies on a masked token and would be lost; move it to the last token of the turn")
    return mask


def reference_gae(rewards_BT, values_BT, mask_BT, *, gamma, lam, reset_BT=None):
    """The recursion as a loop over tokens; a reset token is the last of its own segment."""
    advantage_BT = torch.zeros_like(values_BT)
    carry_B = next_B = torch.zeros_like(values_BT[:, 0])
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


def reference_packed_gae(rewards_N, values_N, mask_N, lengths, *, reset_N=None, **options):
    """The same over rows of any length laid end to end."""
    lengths_R = torch.tensor(lengths, device=values_N.device)
    inside_RT = torch.arange(max(lengths, default=0), device=values_N.device) < lengths_R[:, None]

    def table(values_N):
        return None if values_N is None else values_N.new_zeros(inside_RT.shape).masked_scatter(inside_RT, values_N)

    if not inside_RT.numel():
        return torch.zeros_like(values_N), torch.zeros_like(values_N)
    padded = reference_gae(table(rewards_N), table(values_N), table(mask_N), reset_BT=table(reset_N), **options)
    return padded[0][inside_RT], padded[1][inside_RT]


def _gae(rewards, values, mask, lengths, *, reset=None, **options):
    if use_triton(values):
        from .triton.advantage import triton_gae

        return triton_gae(rewards, values, mask, lengths=lengths, reset=reset, **options)
    if lengths is None:
        return reference_gae(rewards, values, mask, reset_BT=reset, **options)
    return reference_packed_gae(rewards, values, mask, lengths, reset_N=reset, **options)


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    lengths: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns) over the tokens of `mask`; masked tokens (prompts, observations) pass the carry through and
    get 0.

    All are [B, T], or [N] with the `lengths` of the rows that lie end to end. On a GPU a reward on a masked token makes
    it NaN, where a CPU raises.
    """
    mask = _checked_rows(rewards, values, mask, lengths)
    return _gae(rewards, values, mask, lengths, gamma=gamma, lam=lam)


def bilevel_gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    turn_end: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    high_level_gamma: float = 0.95,
    lengths: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns): GAE over turn ends first, whose result becomes each turn's reward for GAE over its tokens.
    Shapes as `gae`.
    """
    mask = _checked_rows(rewards, values, mask, lengths)
    end = turn_end.bool() & mask
    if not rewards.is_cuda and bool((rewards[~end] != 0).any()):
        raise ValueError("a reward lies on a token that turn_end does not mark")
    zero = torch.zeros_like(rewards)
    _, target = _gae(torch.where(end, rewards, zero), values, end, lengths, gamma=high_level_gamma, lam=lam)
    return _gae(torch.where(end, target, zero), values, mask, lengths, gamma=gamma, lam=lam, reset=end)
