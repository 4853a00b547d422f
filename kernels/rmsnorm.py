"""RMS normalisation, with the residual addition in front of it when there is one.

Shape suffixes: N rows (tokens), H hidden.
"""

from __future__ import annotations

import torch

from .dispatch import use_triton


def reference_rmsnorm(
    x_NH: torch.Tensor, weight_H: torch.Tensor, residual_NH: torch.Tensor | None = None, *, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch; the statistics and the product in fp32 (fp64 stays)."""
    sum_NH = x_NH if residual_NH is None else x_NH + residual_NH
    wide = torch.float64 if x_NH.dtype == torch.float64 else torch.float32
    wide_NH = sum_NH.to(wide)
    normed_NH = wide_NH * torch.rsqrt(wide_NH.square().mean(-1, keepdim=True) + eps)
    return (normed_NH * weight_H.to(wide)).to(x_NH.dtype), sum_NH


def rmsnorm(
    x_NH: torch.Tensor, weight_H: torch.Tensor, residual_NH: torch.Tensor | None = None, *, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalised, x + residual): the second feeds the next residual addition; without a residual it is x itself."""
    if use_triton(x_NH):
        from .rmsnorm_triton import triton_rmsnorm

        return triton_rmsnorm(x_NH, weight_H, residual_NH, eps)
    return reference_rmsnorm(x_NH, weight_H, residual_NH, eps=eps)
