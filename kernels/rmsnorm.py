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


def rmsnorm_forward(
    x_NH: torch.Tensor, weight_H: torch.Tensor, residual_NH: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(normalised, x + residual, 1 / root mean square of each row (N)), for callers that go back by `rmsnorm_backward`."""
    if use_triton(x_NH):
        from .rmsnorm_triton import triton_rmsnorm_forward

        return triton_rmsnorm_forward(x_NH, weight_H, residual_NH, eps)
    sum_NH = x_NH if residual_NH is None else x_NH + residual_NH
    rstd_N = torch.rsqrt(sum_NH.square().mean(-1) + eps)
    return sum_NH * rstd_N[:, None] * weight_H, sum_NH, rstd_N


def rmsnorm_backward(
    dy_NH: torch.Tensor, dsum_NH: torch.Tensor, sum_NH: torch.Tensor, weight_H: torch.Tensor, rstd_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of the sum, the one it has from elsewhere added; gradient of the weight in fp32); not differentiable."""
    if use_triton(dy_NH):
        from .rmsnorm_triton import triton_rmsnorm_backward

        return triton_rmsnorm_backward(dy_NH, dsum_NH, sum_NH, weight_H, rstd_N)
    normed_NH, dn_NH = sum_NH * rstd_N[:, None], dy_NH * weight_H
    dx_NH = rstd_N[:, None] * (dn_NH - normed_NH * (dn_NH * normed_NH).mean(-1, keepdim=True)) + dsum_NH
    return dx_NH, (dy_NH * normed_NH).sum(0)
