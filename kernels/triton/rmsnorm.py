"""Triton side of kernels/rmsnorm.py: one read forward, one read backward; the weight gradient in fp32 partial sums of
fixed order.

Shape suffixes: N rows (tokens), H hidden, P programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import cdiv, power_of_2
from ..scaled import LARGEST, SMALLEST
from .fp8 import magnitude, scales_of
from .logprob import multiprocessors


@triton.jit
def _forward_kernel(
    x_ptr, res_ptr, w_ptr, y_ptr, sum_ptr, rstd_ptr, q_ptr, scale_ptr, H, eps,
    BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, FP8: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK)
    ok = o < H
    x = tl.load(x_ptr + row * H + o, mask=ok, other=0.0)
    if RESIDUAL:
        x = (x.to(tl.float32) + tl.load(res_ptr + row * H + o, mask=ok, other=0.0).to(tl.float32)).to(
            x_ptr.dtype.element_ty
        )
        tl.store(sum_ptr + row * H + o, x, mask=ok)
    x = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / H + eps)
    w = tl.load(w_ptr + o, mask=ok, other=0.0).to(tl.float32)
    tl.store(rstd_ptr + row, rstd)
    y = (x * rstd * w).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * H + o, y, mask=ok)
    if FP8:
        scale, inverse = scales_of(tl.max(magnitude(y), axis=0), LARGEST, SMALLEST)
        tl.store(scale_ptr + row, scale)
        tl.store(q_ptr + row * H + o, (y.to(tl.float32) * inverse).to(q_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _backward_kernel(
    dy_ptr, dsum_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, part_ptr, N, H, rows_each,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, BLOCK)[None, :]
    w = tl.load(w_ptr + o, mask=o < H, other=0.0).to(tl.float32)
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    end = tl.minimum((pid + 1) * rows_each, N)
    for first in tl.range(pid * rows_each, end, ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)[:, None]
        ok = (row < end) & (o < H)
        dy = tl.load(dy_ptr + row * H + o, mask=ok, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * H + o, mask=ok, other=0.0).to(tl.float32)
        dsum = tl.load(dsum_ptr + row * H + o, mask=ok, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < end, other=0.0)
        n = x * rstd
        dn = dy * w
        dx = rstd * (dn - n * (tl.sum(dn * n, axis=1)[:, None] / H)) + dsum
        tl.store(dx_ptr + row * H + o, dx.to(dx_ptr.dtype.element_ty), mask=ok)
        dw += dy * n
    tl.store(part_ptr + pid * H + o, tl.sum(dw, axis=0)[None, :], mask=o < H)


def _config(hidden: int) -> tuple[int, int]:
    block = power_of_2(hidden)
    return block, max(1, min(16, block // 512))


def backward_config(hidden: int) -> tuple[int, int, int, int]:
    """(rows at once, warps, programs for each multiprocessor, stages of the loads); benchmarks/tune_kernels.py times
    others.
    """
    block, warps = _config(hidden)
    if 1024 < block <= 4096:  # timed on an H200 at 1536 and 4096
        return 1, 4, 8, 3
    return 1, warps, max(1, 32 // warps), 1


def triton_rmsnorm_forward(
    x_NH, weight_H, residual_NH, eps: float, fp8: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `rmsnorm_forward`; rows lie one after the other. `fp8` takes data and scales of `rmsnorm_scaled`."""
    rows, hidden = x_NH.shape
    y_NH = torch.empty_like(x_NH)
    sum_NH = x_NH if residual_NH is None else torch.empty_like(x_NH)
    rstd_N = torch.empty(rows, dtype=torch.float32, device=x_NH.device)
    block, warps = _config(hidden)
    if rows:
        _forward_kernel[(rows,)](
            x_NH, x_NH if residual_NH is None else residual_NH, weight_H, y_NH, sum_NH, rstd_N,
            *(fp8 or (y_NH, rstd_N)), hidden, eps, BLOCK=block, RESIDUAL=residual_NH is not None,
            FP8=fp8 is not None, LARGEST=LARGEST, SMALLEST=SMALLEST, num_warps=warps,
        )  # fmt: skip
    return y_NH, sum_NH, rstd_N


def triton_rmsnorm_backward(
    dy_NH, dsum_NH, sum_NH, weight_H, rstd_N, config: tuple[int, int, int, int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `rmsnorm_backward`."""
    rows, hidden = sum_NH.shape
    dx_NH = torch.empty_like(sum_NH)
    together, warps, each, stages = config or backward_config(hidden)
    programs = max(1, min(rows, multiprocessors(sum_NH.device) * each))
    made = torch.empty if rows else torch.zeros  # every program writes its part
    part_PH = made((programs, hidden), dtype=torch.float32, device=sum_NH.device)
    if rows:
        _backward_kernel[(programs,)](
            dy_NH.contiguous(), dsum_NH.contiguous(), sum_NH, weight_H, rstd_N, dx_NH, part_PH, rows, hidden,
            cdiv(rows, programs), BLOCK=power_of_2(hidden), ROWS=together, STAGES=stages, num_warps=warps,
        )  # fmt: skip
    return dx_NH, part_PH.sum(0)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_NH, weight_H, residual_NH, eps):
        y_NH, sum_NH, rstd_N = triton_rmsnorm_forward(x_NH, weight_H, residual_NH, eps)
        ctx.save_for_backward(sum_NH, weight_H, rstd_N)
        ctx.residual = residual_NH is not None
        return (y_NH, sum_NH) if ctx.residual else (y_NH, x_NH.view_as(x_NH))

    @staticmethod
    def backward(ctx, dy_NH, dsum_NH):
        dx_NH, dweight_H = triton_rmsnorm_backward(dy_NH, dsum_NH, *ctx.saved_tensors)
        return dx_NH, dweight_H.to(ctx.saved_tensors[1].dtype), dx_NH if ctx.residual else None, None


def triton_rmsnorm(
    x: torch.Tensor, weight_H: torch.Tensor, residual: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `rmsnorm`; leading dimensions are flattened."""
    flat = None if residual is None else residual.reshape(-1, x.shape[-1]).contiguous()
    y_NH, sum_NH = _RMSNorm.apply(x.reshape(-1, x.shape[-1]).contiguous(), weight_H, flat, eps)
    return y_NH.view(x.shape), sum_NH.view(x.shape)
