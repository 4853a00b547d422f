"""GAE as a reverse associative scan over affine maps, any mask pattern.

Shape suffixes: B rows, T tokens.

With X = lam A + V, the recursion A = r - V + gamma (lam A' + V') of a kept token over the next kept one is
X = (1 - lam) V + lam r + gamma lam X', a map of one number; a masked token leaves X, a segment's last token starts from 0. Such
maps compose to the same form, so a row is one scan of two numbers a token, and A = (X - V) / lam. A small lam would magnify
rounding there: below a half the state is (A, V) itself, and the scan is over five numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _compose(a1, b1, d1, e1, f1, a2, b2, d2, e2, f2):
    # the first map is applied first: it belongs to the later token
    return a1 * a2, a2 * b1 + b2 * e1, a2 * d1 + b2 * f1 + d2, e1 * e2, e2 * f1 + f2


@triton.jit
def _compose_pair(a1, d1, a2, d2):
    return a1 * a2, a2 * d1 + d2


@triton.jit
def _gae_kernel(
    r_ptr, v_ptr, m_ptr, end_ptr, boot_ptr, adv_ptr, ret_ptr, T, gamma, lam,
    BLOCK: tl.constexpr, BOOT: tl.constexpr, RESET: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * T
    A = 0.0
    nv = 0.0
    if BOOT:
        nv = tl.load(boot_ptr + tl.program_id(0))
    blocks = tl.cdiv(T, BLOCK)
    lanes = tl.arange(0, BLOCK)
    for i in range(blocks):
        o = (blocks - 1 - i) * BLOCK + lanes
        r = tl.load(r_ptr + row + o, mask=o < T, other=0.0)
        v = tl.load(v_ptr + row + o, mask=o < T, other=0.0)
        m = tl.load(m_ptr + row + o, mask=o < T, other=0)
        on = m != 0
        r = tl.where((m == 0) & (r != 0.0), float("nan"), r)  # a reward on a masked token would be lost: say so
        keep = on
        if RESET:
            keep = on & (tl.load(end_ptr + row + o, mask=o < T, other=0) == 0)
        a = tl.where(on, tl.where(keep, gamma * lam, 0.0), 1.0)
        first = lanes == 0
        if PAIR:
            d = tl.where(on, lam * r + (1.0 - lam) * v, 0.0)
            a, d = tl.associative_scan((a, d), 0, _compose_pair, reverse=True)
            state = a * nv + d
            adv = (state - v) * (1.0 / lam)
            nv = tl.sum(tl.where(first, state, 0.0), axis=0)
        else:
            b = tl.where(keep, gamma, 0.0)
            e = tl.where(on, 0.0, 1.0)
            a, b, d, e, f = tl.associative_scan((a, b, tl.where(on, r - v, 0.0), e, tl.where(on, v, 0.0)), 0, _compose, reverse=True)
            adv = a * A + b * nv + d
            A, nv = (
                tl.sum(tl.where(first, adv, 0.0), axis=0),
                tl.sum(tl.where(first, e * nv + f, 0.0), axis=0),
            )
        lost = tl.where(r != r, r, 0.0)
        tl.store(adv_ptr + row + o, tl.where(on, adv, lost), mask=o < T)
        tl.store(ret_ptr + row + o, tl.where(on, adv + v, lost), mask=o < T)


def gae_config(tokens: int) -> tuple[int, int]:
    """(tokens a block, warps)."""
    block = min(1024, max(16, triton.next_power_of_2(tokens)))
    return block, max(1, block // 256)


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
    _gae_kernel[(rows,)](
        rewards_BT, values_BT, mask_BT.view(torch.uint8), mask_BT if reset_BT is None else reset_BT.contiguous().view(torch.uint8),
        values_BT if bootstrap_B is None else bootstrap_B.float().contiguous(), advantage_BT, return_BT, tokens, gamma, lam,
        BLOCK=block, BOOT=bootstrap_B is not None, RESET=reset_BT is not None, PAIR=lam >= 0.5, num_warps=warps,
    )  # fmt: skip
    return advantage_BT, return_BT
