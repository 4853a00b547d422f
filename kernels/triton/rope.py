"""Triton side of kernels/rope.py; the backward is the same rotation the other way.

Shape suffixes: T tokens, A attention heads, D head dimension, R rotated dimensions, P positions of the table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import cdiv, power_of_2


@triton.jit
def _rope_kernel(
    x_ptr, y_ptr, table_ptr, pos_ptr, heads, positions, stride_t, stride_a, R: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr, AB: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    a = tl.program_id(1) * AB + tl.arange(0, AB)[:, None]
    position = tl.load(pos_ptr + token)
    h: tl.constexpr = R // 2
    o = tl.arange(0, HALF)
    inside = (position >= 0) & (position < positions)
    # a position outside the table turns the token into NaN rather than reading past it
    cos = tl.load(table_ptr + position * R + o, mask=(o < h) & inside, other=float("nan"))[None, :]
    sin = tl.load(table_ptr + position * R + h + o, mask=(o < h) & inside, other=float("nan"))[None, :]
    if INVERSE:
        sin = -sin
    ok = (a < heads) & (o < h)[None, :]
    p = x_ptr + token * stride_t + a * stride_a + o[None, :]
    q = y_ptr + (token * heads + a) * D + o[None, :]
    first, second = tl.load(p, mask=ok, other=0.0).to(tl.float32), tl.load(p + h, mask=ok, other=0.0).to(tl.float32)
    tl.store(q, (first * cos - second * sin).to(y_ptr.dtype.element_ty), mask=ok)
    tl.store(q + h, (second * cos + first * sin).to(y_ptr.dtype.element_ty), mask=ok)
    if D > R:
        o = R + tl.arange(0, REST)[None, :]
        ok = (a < heads) & (o < D)
        tl.store(
            y_ptr + (token * heads + a) * D + o, tl.load(x_ptr + token * stride_t + a * stride_a + o, mask=ok), mask=ok
        )


def _turn(x_TAD: torch.Tensor, table_PR: torch.Tensor, positions_T: torch.Tensor, inverse: bool) -> torch.Tensor:
    tokens, heads, dim = x_TAD.shape
    if x_TAD.stride(2) != 1:
        x_TAD = x_TAD.contiguous()
    y_TAD = torch.empty((tokens, heads, dim), dtype=x_TAD.dtype, device=x_TAD.device)
    rotated = table_PR.shape[1]
    block = min(16, power_of_2(heads))
    if tokens:
        _rope_kernel[(tokens, cdiv(heads, block))](
            x_TAD, y_TAD, table_PR, positions_T, heads, table_PR.shape[0], x_TAD.stride(0), x_TAD.stride(1), R=rotated,
            D=dim,
            HALF=power_of_2(rotated // 2), REST=power_of_2(max(1, dim - rotated)), AB=block, INVERSE=inverse,
            num_warps=4,
        )  # fmt: skip
    return y_TAD


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TAD, table_PR, positions_T):
        ctx.save_for_backward(table_PR, positions_T)
        return _turn(x_TAD, table_PR, positions_T, False)

    @staticmethod
    def backward(ctx, grad_TAD):
        return _turn(grad_TAD, *ctx.saved_tensors, True), None, None


def triton_rope(x_TAD: torch.Tensor, table_PR: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
    """See `rope`."""
    return _Rope.apply(x_TAD, table_PR.contiguous(), positions_T.contiguous())
