"""GAE as a reverse associative scan over affine maps, any mask pattern.

Shape suffixes: B rows, T tokens.

With X = lam A + V, the recursion A = r - V + gamma (lam A' + V') of a kept token over the next kept one is
X = (1 - lam) V + lam r + gamma lam X', a map of one number; a masked token leaves X, a segment's last token starts from 0. Such
maps compose to the same form, so a row is one scan of two numbers, and A = (X - V) / lam. A small lam would magnify
rounding there: below a half the state is (A, V) itself, and the scan is over five numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .dispatch import power_of_2


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
    r_ptr, v_ptr, m_ptr, end_ptr, boot_ptr, adv_ptr, ret_ptr, T, gamma, lam,
    BLOCK: tl.constexpr, BOOT: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    """One row a program; a thread owns four neighbouring tokens, so that threads exchange one map each and not one a token."""
    GROUPS: tl.constexpr = BLOCK // 4
    row = tl.program_id(0).to(tl.int64) * T
    X = 0.0
    if BOOT:
        X = tl.load(boot_ptr + tl.program_id(0))
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
        A, D, P, Q = tl.associative_scan((a0, d0, tl.full([GROUPS], 1.0, tl.float32), tl.zeros([GROUPS], tl.float32)), 0, _compose_before)
        behind = P * X + Q
        states = tl.join(tl.join(a0 * behind + d0, a2 * behind + d2), tl.join(a1 * behind + d1, a3 * behind + d3))
        adv = (tl.reshape(states, [GROUPS, 4]) - v) * (1.0 / lam)
        X = tl.sum(tl.where(group == GROUPS - 1, A * X + D, 0.0), axis=0)
        _store(adv_ptr, ret_ptr, row + t, t < T, r, v, on, adv)


@triton.jit
def _small_lam_kernel(
    r_ptr, v_ptr, m_ptr, end_ptr, boot_ptr, adv_ptr, ret_ptr, T, gamma, lam,
    BLOCK: tl.constexpr, BOOT: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * T
    A = 0.0
    V = 0.0
    if BOOT:
        V = tl.load(boot_ptr + tl.program_id(0))
    blocks = tl.cdiv(T, BLOCK)
    lanes = tl.arange(0, BLOCK)
    for i in range(blocks):
        t = (blocks - 1 - i) * BLOCK + lanes
        r, v, on, keep = _tokens(r_ptr, v_ptr, m_ptr, end_ptr, row + t, t < T, RESET)
        a = tl.where(on, tl.where(keep, gamma * lam, 0.0), 1.0)
        b = tl.where(keep, gamma, 0.0)
        e = tl.where(on, 0.0, 1.0)
        a, b, d, e, f = tl.associative_scan((a, b, tl.where(on, r - v, 0.0), e, tl.where(on, v, 0.0)), 0, _compose, reverse=True)
        adv = a * A + b * V + d
        A, V = tl.sum(tl.where(lanes == 0, adv, 0.0), axis=0), tl.sum(tl.where(lanes == 0, e * V + f, 0.0), axis=0)
        _store(adv_ptr, ret_ptr, row + t, t < T, r, v, on, adv)


def gae_config(tokens: int) -> tuple[int, int]:
    """(tokens a block, warps)."""
    block = min(512, max(16, power_of_2(tokens)))
    return block, max(1, block // 128)


def triton_gae(
    rewards_BT: torch.Tensor,
    values_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap_B: torch.Tensor | None = None,
    reset_BT: torch.Tensor | None = None,
    config: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `gae`; `reset_BT` marks tokens that are the last of their own segment."""
    rewards_BT, values_BT = rewards_BT.float().contiguous(), values_BT.float().contiguous()
    mask_BT = mask_BT.contiguous()
    advantage_BT, return_BT = torch.empty_like(values_BT), torch.empty_like(values_BT)
    rows, tokens = values_BT.shape
    if values_BT.numel() == 0:
        return advantage_BT, return_BT
    block, warps = config or gae_config(tokens)
    kernel = _gae_kernel if lam >= 0.5 else _small_lam_kernel
    kernel[(rows,)](
        rewards_BT, values_BT, mask_BT.view(torch.uint8), mask_BT if reset_BT is None else reset_BT.contiguous().view(torch.uint8),
        values_BT if bootstrap_B is None else bootstrap_B.float().contiguous(), advantage_BT, return_BT, tokens, gamma, lam,
        BLOCK=block, BOOT=bootstrap_B is not None, RESET=reset_BT is not None, num_warps=warps,
    )  # fmt: skip
    return advantage_BT, return_BT
