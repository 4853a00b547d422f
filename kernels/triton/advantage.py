"""Group advantages and GAE, over rows of one length or of any lengths laid end to end.

Shape suffixes: S samples, G groups, B rows of T tokens, R rows of any length in N tokens.

GAE is a reverse associative scan over affine maps, for any mask pattern. With X = lam A + V, the recursion A = r - V +
gamma (lam A' + V') of a kept token over the next kept one is X = (1 - lam) V + lam r + gamma lam X', a map of one
number; a masked token leaves X, a segment's last token starts from 0. Such maps compose to the same form, so a row is
one scan of two numbers, and A = (X - V) / lam. A small lam would magnify rounding there: below a half the state is (A,
V) itself, and the scan is over five numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl

from ..dispatch import cdiv, power_of_2
from ..group_std import EPS, mean_group_std


@triton.jit
def _members(r_ptr, valid_ptr, order_ptr, at, last):
    """Which samples these are, their rewards in fp64 (0 where Invalid), and which of them count."""
    sample = tl.load(order_ptr + at, mask=at < last, other=0)
    on = tl.load(valid_ptr + sample, mask=at < last, other=0) != 0
    r = tl.load(r_ptr + sample, mask=on & (at < last), other=0.0).to(tl.float64)
    return sample, r, on


@triton.jit
def _group_kernel(
    r_ptr, valid_ptr, order_ptr, first_ptr, scale_ptr, adv_ptr, std_ptr, eps,
    METHOD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One group a program. In fp64, as rewards may differ by little beside their mean; a group is small, so that
    costs nothing.
    """
    first, last = tl.load(first_ptr + tl.program_id(0)), tl.load(first_ptr + tl.program_id(0) + 1)
    lanes = tl.arange(0, BLOCK)
    counts, totals, squares = (
        tl.zeros([BLOCK], tl.float64),
        tl.zeros([BLOCK], tl.float64),
        tl.zeros([BLOCK], tl.float64),
    )
    for begin in range(first, last, BLOCK):
        _, r, on = _members(r_ptr, valid_ptr, order_ptr, begin + lanes, last)
        counts += on.to(tl.float64)
        totals += r
    count = tl.sum(counts, axis=0)
    mean = tl.sum(totals, axis=0) / tl.where(count > 1.0, count, 1.0)
    others = tl.where(count > 2.0, count - 1.0, 1.0)
    for begin in range(first, last, BLOCK):
        _, r, on = _members(r_ptr, valid_ptr, order_ptr, begin + lanes, last)
        squares += tl.where(on, (r - mean) * (r - mean), 0.0)
    std = tl.sqrt(tl.sum(squares, axis=0) / others)
    if METHOD == "std":
        tl.store(std_ptr + tl.program_id(0), tl.where(count > 1.0, std, -1.0))
    else:
        for begin in range(first, last, BLOCK):
            at = begin + lanes
            sample, r, on = _members(r_ptr, valid_ptr, order_ptr, at, last)
            x = r
            if METHOD != "identity":
                x = r - mean
                if METHOD == "leave_one_out":
                    x = x * count / others
                elif METHOD == "uniform_std":
                    x = x / (tl.load(scale_ptr) + eps)
                elif METHOD != "mean":
                    x = x / (std + eps)
                if METHOD == "asym_clip":
                    x = tl.where(x < -1.0, -1.0, tl.where(x > 3.0, 3.0, x))
                x = tl.where(count == 1.0, r * 0.0, x)
            tl.store(adv_ptr + sample, tl.where(on, x, 0.0).to(tl.float32), mask=at < last)


@triton.jit
def _spread_kernel(value_ptr, sample_ptr, start_ptr, out_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.load(start_ptr + row) + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(value_ptr + tl.load(sample_ptr + row))
    tl.store(out_ptr + at, value, mask=at < tl.load(start_ptr + row + 1))


@triton.jit
def _compose(a1, b1, d1, e1, f1, a2, b2, d2, e2, f2):
    # the first map is applied first: it belongs to the later token
    return a1 * a2, a2 * b1 + b2 * e1, a2 * d1 + b2 * f1 + d2, e1 * e2, e2 * f1 + f2


@triton.jit
def _compose_pair(a1, d1, a2, d2):
    return a1 * a2, a2 * d1 + d2


@triton.jit
def _compose_before(a1, d1, p1, q1, a2, d2, p2, q2):
    # beside the composed map, that of all but its last: what reaches a group of tokens from behind
    return a1 * a2, a2 * d1 + d2, a1 * p2, p2 * d1 + q2


@triton.jit
def _four(x, GROUPS: tl.constexpr):
    """The four columns of [GROUPS, 4]: a thread's own, so no exchange."""
    even, odd = tl.split(tl.reshape(x, [GROUPS, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _row(start_ptr, T, PACKED: tl.constexpr):
    """Where this program's row begins, and how long it is."""
    if PACKED:
        begin = tl.load(start_ptr + tl.program_id(0))
        return begin, tl.load(start_ptr + tl.program_id(0) + 1) - begin
    else:
        return tl.program_id(0).to(tl.int64) * T, T


@triton.jit
def _tokens(r_ptr, v_ptr, m_ptr, end_ptr, o, ok, RESET: tl.constexpr):
    """Reward, value, and whether a token is kept and hands its carry on."""
    r = tl.load(r_ptr + o, mask=ok, other=0.0)
    v = tl.load(v_ptr + o, mask=ok, other=0.0)
    m = tl.load(m_ptr + o, mask=ok, other=0)
    on = m != 0
    r = tl.where((m == 0) & (r != 0.0), float("nan"), r)  # a reward on a masked token would be lost: say so
    keep = on
    if RESET:
        keep = on & (tl.load(end_ptr + o, mask=ok, other=0) == 0)
    return r, v, on, keep


@triton.jit
def _store(adv_ptr, ret_ptr, o, ok, r, v, on, adv):
    lost = tl.where(r != r, r, 0.0)
    tl.store(adv_ptr + o, tl.where(on, adv, lost), mask=ok)
    tl.store(ret_ptr + o, tl.where(on, adv + v, lost), mask=ok)


@triton.jit
def _gae_kernel(
    r_ptr, v_ptr, m_ptr, end_ptr, start_ptr, adv_ptr, ret_ptr, tokens, gamma, lam,
    BLOCK: tl.constexpr, RESET: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One row a program; a thread owns four neighbouring tokens, so that threads exchange one map each and not one a
    token.
    """
    GROUPS: tl.constexpr = BLOCK // 4
    row, T = _row(start_ptr, tokens, PACKED)
    X = 0.0
    blocks = tl.cdiv(T, BLOCK)
    group, place = tl.arange(0, GROUPS), tl.arange(0, 4)[None, :]
    lanes = (GROUPS - 1 - group)[:, None] * 4 + place  # the last tokens first
    for i in range(blocks):
        t = (blocks - 1 - i) * BLOCK + lanes
        r, v, on, keep = _tokens(r_ptr, v_ptr, m_ptr, end_ptr, row + t, t < T, RESET)
        a = tl.where(on, tl.where(keep, gamma * lam, 0.0), 1.0)
        d = tl.where(on, lam * r + (1.0 - lam) * v, 0.0)
        a0, a1, a2, a3 = _four(a, GROUPS)
        d0, d1, d2, d3 = _four(d, GROUPS)
        a2, d2 = _compose_pair(a3, d3, a2, d2)
        a1, d1 = _compose_pair(a2, d2, a1, d1)
        a0, d0 = _compose_pair(a1, d1, a0, d0)
        A, D, P, Q = tl.associative_scan(
            (a0, d0, tl.full([GROUPS], 1.0, tl.float32), tl.zeros([GROUPS], tl.float32)), 0, _compose_before
        )
        behind = P * X + Q
        states = tl.join(tl.join(a0 * behind + d0, a2 * behind + d2), tl.join(a1 * behind + d1, a3 * behind + d3))
        adv = (tl.reshape(states, [GROUPS, 4]) - v) * (1.0 / lam)
        X = tl.sum(tl.where(group == GROUPS - 1, A * X + D, 0.0), axis=0)
        _store(adv_ptr, ret_ptr, row + t, t < T, r, v, on, adv)


@triton.jit
def _small_lam_kernel(
    r_ptr, v_ptr, m_ptr, end_ptr, start_ptr, adv_ptr, ret_ptr, tokens, gamma, lam,
    BLOCK: tl.constexpr, RESET: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    row, T = _row(start_ptr, tokens, PACKED)
    A = 0.0
    V = 0.0
    blocks = tl.cdiv(T, BLOCK)
    lanes = tl.arange(0, BLOCK)
    for i in range(blocks):
        t = (blocks - 1 - i) * BLOCK + lanes
        r, v, on, keep = _tokens(r_ptr, v_ptr, m_ptr, end_ptr, row + t, t < T, RESET)
        a = tl.where(on, tl.where(keep, gamma * lam, 0.0), 1.0)
        b = tl.where(keep, gamma, 0.0)
        e = tl.where(on, 0.0, 1.0)
        a, b, d, e, f = tl.associative_scan(
            (a, b, tl.where(on, r - v, 0.0), e, tl.where(on, v, 0.0)), 0, _compose, reverse=True
        )
        adv = a * A + b * V + d
        A, V = tl.sum(tl.where(lanes == 0, adv, 0.0), axis=0), tl.sum(tl.where(lanes == 0, e * V + f, 0.0), axis=0)
        _store(adv_ptr, ret_ptr, row + t, t < T, r, v, on, adv)


def gae_config(tokens: int) -> tuple[int, int]:
    """(tokens a block, warps)."""
    block = min(512, max(16, power_of_2(tokens)))
    return block, max(1, block // 128)


def _row_starts(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.long).to(device)


def triton_gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    gamma: float,
    lam: float,
    reset: torch.Tensor | None = None,
    lengths: Sequence[int] | None = None,
    config: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `gae`; `reset` marks tokens that are the last of their own segment."""
    rewards, values = rewards.float().contiguous(), values.float().contiguous()
    mask = mask.contiguous()
    advantages, returns = torch.empty_like(values), torch.empty_like(values)
    if values.numel() == 0:
        return advantages, returns
    rows, tokens = values.shape if lengths is None else (len(lengths), max(lengths))
    starts = values if lengths is None else _row_starts(lengths, values.device)
    block, warps = config or gae_config(tokens)
    kernel = _gae_kernel if lam >= 0.5 else _small_lam_kernel
    kernel[(rows,)](
        rewards, values, mask.view(torch.uint8), mask if reset is None else reset.contiguous().view(torch.uint8),
        starts, advantages, returns, tokens, gamma, lam,
        BLOCK=block, RESET=reset is not None, PACKED=lengths is not None, num_warps=warps,
    )  # fmt: skip
    return advantages, returns


def triton_group_advantage(
    rewards_S: torch.Tensor,
    index_S: torch.Tensor,
    valid_S: torch.Tensor | None,
    *,
    method: str,
    gather: Callable[[Any], list[Any]],
) -> torch.Tensor:
    """See `group_advantage`; `index_S` numbers the groups and is on the host."""
    device = rewards_S.device
    rewards_S = rewards_S.detach().float().contiguous()
    valid_S = (
        torch.ones_like(rewards_S, dtype=torch.bool) if valid_S is None else torch.as_tensor(valid_S).bool().to(device)
    )
    sizes_G = torch.bincount(index_S)
    order_S = torch.argsort(index_S, stable=True).to(device)
    first_G1 = torch.cat([sizes_G.new_zeros(1), sizes_G.cumsum(0)]).to(device)
    advantage_S = torch.empty_like(rewards_S)
    std_G = torch.empty(len(sizes_G), dtype=torch.float64, device=device)
    block = min(1024, max(16, power_of_2(int(sizes_G.max())))) if len(sizes_G) else 16

    def launch(method: str, scale: torch.Tensor) -> None:
        if len(sizes_G):
            _group_kernel[(len(sizes_G),)](
                rewards_S, valid_S.view(torch.uint8), order_S, first_G1, scale, advantage_S, std_G, EPS,
                METHOD=method, BLOCK=block, num_warps=max(1, min(4, block // 128)),
            )  # fmt: skip

    scale = std_G
    if method == "uniform_std":
        launch("std", scale)
        scale = torch.tensor([mean_group_std(std_G, std_G >= 0, gather)], dtype=torch.float64).to(device)
    launch(method, scale)
    return advantage_S


def triton_spread_rows(values_S: torch.Tensor, sample_R: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """See `spread_rows`."""
    out_N = torch.empty(sum(lengths), dtype=values_S.dtype, device=values_S.device)
    if len(out_N):
        block = min(2048, max(16, power_of_2(max(lengths))))
        chosen_R = torch.tensor(sample_R, dtype=torch.long).to(values_S.device)
        _spread_kernel[(len(lengths), cdiv(max(lengths), block))](
            values_S.contiguous(), chosen_R, _row_starts(lengths, values_S.device), out_N, BLOCK=block
        )
    return out_N
