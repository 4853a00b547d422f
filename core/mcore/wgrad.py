"""Weight gradients added to their fp32 buffers by the matrix product itself, without a bf16 gradient in between.

Megatron does this through an extension of NVIDIA apex. Where that is not installed, a product of torch's with fp32
output takes its place.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def is_zero(weight: Any) -> bool:
    """Whether the weight's fp32 buffer still holds the zeros of the step's beginning: then a product may write to it
    what it would add. Replayed graphs add without saying so.
    """
    return not getattr(weight, "grad_added_to_main_grad", True) and not getattr(weight, "graphed", False)


def add_weight_grad(inputs: torch.Tensor, grads: torch.Tensor, total: torch.Tensor, zero: bool = False) -> None:
    """total += grads.T @ inputs, both with one row for each token; `total` is fp32, and need not be read if `zero`."""
    if not inputs.numel():  # an expert that no token chose
        return
    if inputs.dtype == total.dtype:
        total.addmm_(grads.t(), inputs)
    elif total.is_cuda and "dtype_out" in torch.ops.aten.addmm.overloads():  # torch 2.8 and later
        if zero:
            torch.mm(grads.t(), inputs, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, grads.t(), inputs, out_dtype=total.dtype, out=total)
    elif zero:
        total.copy_(grads.t() @ inputs)
    else:
        total.add_(grads.t() @ inputs)


def complete_megatron() -> None:
    """Give Megatron's linear layers this function where apex's extension is missing."""
    from megatron.core.tensor_parallel import layers

    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add_weight_grad)
        layers._grad_accum_fusion_available = True
