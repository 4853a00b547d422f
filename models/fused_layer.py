"""The two halves of a dense layer around attention, each one function with its gradients written out.

A step of a small model waits for the host. Module by module such a layer costs it hundreds of Python calls; as two
functions some tens. They hold whole weights: with tensor parallelism, adapters or experts the layer goes module by
module (models/layers.py), and the tests hold one way to the other.

Shape suffixes: T tokens, H hidden, C columns of the projection to heads, A columns of attention's output, F
feed-forward width.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.mcore.wgrad import add_weight_grad, is_zero
from ..kernels import rmsnorm_backward, rmsnorm_forward, swiglu, swiglu_backward


def weight_gradient(weight: Any, inputs: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
    """grads.T @ inputs, added to the weight's fp32 buffer where it has one; Megatron's hook then only wants to be
    called.
    """
    total = getattr(weight, "main_grad", None)
    if total is None:
        return grads.T @ inputs
    add_weight_grad(inputs, grads, total, is_zero(weight))
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)


def norm_gradient(weight: Any, grad_H: torch.Tensor) -> torch.Tensor:
    """The same of a norm's weight, whose gradient is there already."""
    total = getattr(weight, "main_grad", None)
    if total is None:
        return grad_H.to(weight.dtype)
    total.add_(grad_H)  # in fp32, which the model's own type would round
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)


class _Before(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, norm_H, weight_CH, eps):
        normed_TH, _, rstd_T = rmsnorm_forward(x_TH, norm_H, None, eps)
        ctx.save_for_backward(x_TH, normed_TH, rstd_T, norm_H, weight_CH)
        return normed_TH @ weight_CH.T, x_TH.view_as(x_TH)

    @staticmethod
    def backward(ctx, grad_TC, residual_TH):
        x_TH, normed_TH, rstd_T, norm_H, weight_CH = ctx.saved_tensors
        dx_TH, dnorm_H = rmsnorm_backward(grad_TC @ weight_CH, residual_TH, x_TH, norm_H, rstd_T)
        return dx_TH, norm_gradient(norm_H, dnorm_H), weight_gradient(weight_CH, normed_TH, grad_TC), None


class _After(torch.autograd.Function):
    @staticmethod
    def forward(ctx, attended_TA, residual_TH, out_HA, norm_H, up_2FH, down_HF, eps):
        normed_TH, sum_TH, rstd_T = rmsnorm_forward(attended_TA @ out_HA.T, norm_H, residual_TH, eps)
        gates_T2F = normed_TH @ up_2FH.T
        ctx.save_for_backward(attended_TA, sum_TH, normed_TH, rstd_T, gates_T2F, out_HA, norm_H, up_2FH, down_HF)
        return sum_TH + swiglu(gates_T2F) @ down_HF.T

    @staticmethod
    def backward(ctx, grad_TH):
        attended_TA, sum_TH, normed_TH, rstd_T, gates_T2F, out_HA, norm_H, up_2FH, down_HF = ctx.saved_tensors
        dgates_T2F, gated_TF = swiglu_backward(gates_T2F, grad_TH @ down_HF)  # made again rather than kept
        ddown = weight_gradient(down_HF, gated_TF, grad_TH)
        dsum_TH, dnorm_H = rmsnorm_backward(dgates_T2F @ up_2FH, grad_TH, sum_TH, norm_H, rstd_T)
        dup = weight_gradient(up_2FH, normed_TH, dgates_T2F)
        dout = weight_gradient(out_HA, attended_TA, dsum_TH)
        return dsum_TH @ out_HA, dsum_TH, dout, norm_gradient(norm_H, dnorm_H), dup, ddown, None


def before_attention(
    x_TH: torch.Tensor, norm_H: torch.Tensor, weight_CH: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(projection of the norm of x (T, C), x). Going on from the returned x lets one kernel join its two gradients."""
    return _Before.apply(x_TH, norm_H, weight_CH, eps)  # type: ignore[return-value]


def after_attention(
    attended_TA: torch.Tensor,
    residual_TH: torch.Tensor,
    out_HA: torch.Tensor,
    norm_H: torch.Tensor,
    up_2FH: torch.Tensor,
    down_HF: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The rest of the layer: output projection, residual addition, norm, gated feed-forward block, residual
    addition.
    """
    return _After.apply(attended_TA, residual_TH, out_HA, norm_H, up_2FH, down_HF, eps)  # type: ignore[return-value]
