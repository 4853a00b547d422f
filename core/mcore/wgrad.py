"""Weight gradients added to their fp32 buffers by the matrix product itself, without a bf16 gradient in between.

Megatron does this through an extension of NVIDIA apex. Where that is not installed, a product of torch's with fp32
output takes its place.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch


def add_weight_grad(inputs: torch.Tensor, grads: torch.Tensor, total: torch.Tensor) -> None:
    """total += grads.T @ inputs, both with one row for each token; `total` is fp32."""
    if not inputs.numel():  # an expert that no token chose
        return
    if inputs.dtype == total.dtype:
        total.addmm_(grads.t(), inputs)
    elif total.is_cuda and "dtype_out" in torch.ops.aten.addmm.overloads():  # torch 2.8 and later
        torch.addmm(total, grads.t(), inputs, out_dtype=total.dtype, out=total)
    else:
        total.add_(grads.t() @ inputs)


def complete_megatron() -> None:
    """Give Megatron's linear layers this function where apex's extension is missing."""
    from megatron.core.tensor_parallel import layers

    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add_weight_grad)
        layers._grad_accum_fusion_available = True
