"""AdamW's update of many tensors, with clipping, the decision to skip and the rounded copy for the model in the same
pass.

Shape suffixes: N elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .dispatch import use_triton

# master weights, gradient and both moments (fp32, N), the model's copy (bf16, N) where it is not the master, updates
# made with this one
Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]


def reference_adam_update(
    parts: Sequence[Part],
    divisor: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Plain torch."""
    for master_N, grad_N, exp_avg_N, exp_avg_sq_N, copy_N, step in parts:
        if bool(divisor.isfinite()):
            grad_N = grad_N / divisor
            count = float(step)
            master_N.mul_(1.0 - lr * weight_decay)
            exp_avg_N.lerp_(grad_N, 1.0 - betas[0])
            exp_avg_sq_N.mul_(betas[1]).addcmul_(grad_N, grad_N, value=1.0 - betas[1])
            denominator_N = (exp_avg_sq_N / (1.0 - betas[1] ** count)).sqrt_().add_(eps)
            master_N.addcdiv_(exp_avg_N, denominator_N, value=-lr / (1.0 - betas[0] ** count))
        if copy_N is not None:
            copy_N.copy_(master_N)


def adam_update(
    parts: Sequence[Part],
    divisor: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update in place. Steps and `divisor` (of the gradients) are scalars on the device, so the host never waits; a
    divisor that is not finite leaves everything as it is. On a GPU all tensors go in one launch, whatever their number;
    they must be contiguous."""
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    if use_triton(divisor):
        from .triton.adam import triton_adam_update

        triton_adam_update(parts, divisor, **options)
    else:
        reference_adam_update(parts, divisor, **options)
