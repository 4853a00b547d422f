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
    y_NH, sum_NH, _ = reference_rmsnorm_forward(x_NH, weight_H, residual_NH, eps)
    return y_NH, sum_NH


def rmsnorm(
    x_NH: torch.Tensor, weight_H: torch.Tensor, residual_NH: torch.Tensor | None = None, *, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalised, x + residual): the second feeds the next residual addition; without a residual it is x itself."""
    if use_triton(x_NH):
        from .triton.rmsnorm import triton_rmsnorm

        return triton_rmsnorm(x_NH, weight_H, residual_NH, eps)
    return reference_rmsnorm(x_NH, weight_H, residual_NH, eps=eps)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def reference_rmsnorm_forward(
    x_NH: torch.Tensor, weight_H: torch.Tensor, residual_NH: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Plain torch."""
    sum_NH = x_NH if residual_NH is None else x_NH + residual_NH
    wide_NH = sum_NH.to(_wide(x_NH))
    rstd_N = torch.rsqrt(wide_NH.square().mean(-1) + eps)
    return (wide_NH * rstd_N[..., None] * weight_H.to(wide_NH.dtype)).to(x_NH.dtype), sum_NH, rstd_N


def rmsnorm_forward(
    x_NH: torch.Tensor, weight_H: torch.Tensor, residual_NH: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(normalised, x + residual, 1 / root mean square of each row (N)), for callers that go back by
    `rmsnorm_backward`.
    """
    if use_triton(x_NH):
        from .triton.rmsnorm import triton_rmsnorm_forward

        return triton_rmsnorm_forward(x_NH, weight_H, residual_NH, eps)
    return reference_rmsnorm_forward(x_NH, weight_H, residual_NH, eps)


def reference_rmsnorm_backward(
    dy_NH: torch.Tensor, dsum_NH: torch.Tensor, sum_NH: torch.Tensor, weight_H: torch.Tensor, rstd_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch, in fp32 (fp64 stays)."""
    wide = _wide(sum_NH)
    dy, normed_NH = dy_NH.to(wide), sum_NH.to(wide) * rstd_N[:, None]
    dn_NH = dy * weight_H.to(wide)
    dx_NH = rstd_N[:, None] * (dn_NH - normed_NH * (dn_NH * normed_NH).mean(-1, keepdim=True)) + dsum_NH.to(wide)
    return dx_NH.to(sum_NH.dtype), (dy * normed_NH).sum(0)


def rmsnorm_backward(
    dy_NH: torch.Tensor, dsum_NH: torch.Tensor, sum_NH: torch.Tensor, weight_H: torch.Tensor, rstd_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of the sum, the one it has from elsewhere added; gradient of the weight in fp32); not
    differentiable.
    """
    if use_triton(dy_NH):
        from .triton.rmsnorm import triton_rmsnorm_backward

        return triton_rmsnorm_backward(dy_NH, dsum_NH, sum_NH, weight_H, rstd_N)
    return reference_rmsnorm_backward(dy_NH, dsum_NH, sum_NH, weight_H, rstd_N)
