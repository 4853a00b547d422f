"""Triton side of kernels/fsq.py.

Shape suffixes: N latents, C latent dimensions.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl

from ..dispatch import cdiv, power_of_2
from ..fsq_levels import fsq_constants
from .logprob import LOG2E


@triton.jit
def _tanh(y):
    # a Pade form where 1 - 2 / (exp(2y) + 1) would cancel
    y2 = y * y
    small = y * (10395.0 + y2 * (1260.0 + 21.0 * y2)) / (10395.0 + y2 * (4725.0 + y2 * (210.0 + y2)))
    large = 1.0 - 2.0 / (tl.exp2(2.0 * LOG2E * y) + 1.0)
    return tl.where(tl.abs(y) < 1.0, small, large)


@triton.jit
def _quantize_kernel(
    z_ptr, const_ptr, code_ptr, index_ptr, slope_ptr, N, C: tl.constexpr, CB: tl.constexpr, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, CB)
    ok = (n < N)[:, None] & (c < C)[None, :]
    half = tl.load(const_ptr + c, mask=c < C, other=1.0)[None, :]
    offset = tl.load(const_ptr + C + c, mask=c < C, other=0.0)[None, :]
    shift = tl.load(const_ptr + 2 * C + c, mask=c < C, other=0.0)[None, :]
    width = tl.load(const_ptr + 3 * C + c, mask=c < C, other=1.0)[None, :]
    basis = tl.load(const_ptr + 4 * C + c, mask=c < C, other=0.0)[None, :]
    o = n[:, None] * C + c[None, :]
    t = _tanh(tl.load(z_ptr + o, mask=ok, other=0.0).to(tl.float32) + shift)
    y = t * half - offset
    # round half to even, as torch does
    level = tl.floor(y + 0.5)
    odd = level - 2.0 * tl.floor(level * 0.5)
    level = tl.where((level - y == 0.5) & (odd == 1.0), level - 1.0, level)
    tl.store(code_ptr + o, level / width, mask=ok)
    tl.store(slope_ptr + o, half * (1.0 - t * t) / width, mask=ok)
    index = tl.sum(tl.where(ok, (level + width) * basis, 0.0), axis=1)
    bad = tl.sum(tl.where(ok & (y != y), 1.0, 0.0), axis=1) > 0.0
    tl.store(index_ptr + n, tl.where(bad, -1.0, index).to(tl.int64), mask=n < N)


@triton.jit
def _dequantize_kernel(index_ptr, const_ptr, code_ptr, N, size, C: tl.constexpr, CB: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, CB)
    ok = (n < N)[:, None] & (c < C)[None, :]
    width = tl.load(const_ptr + 3 * C + c, mask=c < C, other=1.0)[None, :]
    basis = tl.load(const_ptr + 4 * C + c, mask=c < C, other=1.0)[None, :].to(tl.int64)
    levels = tl.load(const_ptr + 5 * C + c, mask=c < C, other=1.0)[None, :].to(tl.int64)
    i = tl.load(index_ptr + n, mask=n < N, other=0).to(tl.int64)[:, None]
    code = (((i // basis) % levels).to(tl.float32) - width) / width
    code = tl.where((i >= 0) & (i < size), code, float("nan"))
    tl.store(code_ptr + n[:, None] * C + c[None, :], code, mask=ok)


@cache
def _constants(levels: tuple[int, ...], device: torch.device) -> torch.Tensor:
    if math.prod(levels) > 1 << 24:
        raise ValueError(
            f"an FSQ codebook of {math.prod(levels)} does not fit the kernel's fp32 index arithmetic (2**24)"
        )
    return torch.tensor([*fsq_constants(levels), list(levels)], dtype=torch.float32, device=device).contiguous()


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z_NC, levels):
        N, C = z_NC.shape
        code_NC, slope_NC = (torch.empty((N, C), dtype=torch.float32, device=z_NC.device) for _ in range(2))
        index_N = torch.empty(N, dtype=torch.long, device=z_NC.device)
        if N:
            _quantize_kernel[(cdiv(N, 256),)](
                z_NC, _constants(levels, z_NC.device), code_NC, index_N, slope_NC, N, C=C, CB=power_of_2(C), BLOCK=256
            )
        ctx.save_for_backward(slope_NC)
        ctx.dtype = z_NC.dtype
        ctx.mark_non_differentiable(index_N)
        return code_NC, index_N

    @staticmethod
    def backward(ctx, grad_NC, _):
        (slope_NC,) = ctx.saved_tensors
        return (grad_NC * slope_NC).to(ctx.dtype), None


def triton_fsq_quantize(z: torch.Tensor, levels: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """See `fsq_quantize`."""
    code, index = _Quantize.apply(z.reshape(-1, len(levels)).contiguous(), levels)
    return code.view(z.shape), index.view(z.shape[:-1])


def triton_fsq_dequantize(index: torch.Tensor, levels: tuple[int, ...]) -> torch.Tensor:
    """See `fsq_dequantize`."""
    flat = index.reshape(-1).contiguous()
    code = torch.empty((len(flat), len(levels)), dtype=torch.float32, device=index.device)
    if len(flat):
        _dequantize_kernel[(cdiv(len(flat), 256),)](
            flat, _constants(levels, index.device), code, len(flat), math.prod(levels), C=len(levels),
            CB=power_of_2(len(levels)), BLOCK=256,
        )  # fmt: skip
    return code.view(*index.shape, len(levels))
