"""SwiGLU: silu(gate) * up, of a projection that holds gate and up side by side.

Shape suffixes: N rows (tokens), F feed-forward width.
"""

from __future__ import annotations

import torch

from .dispatch import use_triton


def reference_swiglu(x_N2F: torch.Tensor) -> torch.Tensor:
    """Plain torch, products in fp32 (fp64 stays)."""
    gate, up = x_N2F.to(torch.float64 if x_N2F.dtype == torch.float64 else torch.float32).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x_N2F.dtype)


def swiglu(x_N2F: torch.Tensor) -> torch.Tensor:
    """silu of the first half times the second half of the last dimension."""
    if use_triton(x_N2F):
        from .triton.swiglu import triton_swiglu

        return triton_swiglu(x_N2F)
    return reference_swiglu(x_N2F)


def reference_swiglu_backward(x_N2F: torch.Tensor, dy_NF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch, products in fp32 (fp64 stays)."""
    wide = torch.float64 if x_N2F.dtype == torch.float64 else torch.float32
    gate, up = x_N2F.to(wide).chunk(2, dim=-1)
    sigmoid, dy = torch.sigmoid(gate), dy_NF.to(wide)
    dx_N2F = torch.cat([dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), dy * gate * sigmoid], dim=-1)
    return dx_N2F.to(x_N2F.dtype), (gate * sigmoid * up).to(x_N2F.dtype)


def swiglu_backward(x_N2F: torch.Tensor, dy_NF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of the input, the output made again), for callers that do not keep the output; not differentiable."""
    if use_triton(x_N2F):
        from .triton.swiglu import triton_swiglu_backward

        return triton_swiglu_backward(x_N2F, dy_NF)
    return reference_swiglu_backward(x_N2F, dy_NF)


def reference_weighted_swiglu(x_N2F: torch.Tensor, weight_N: torch.Tensor) -> torch.Tensor:
    """Plain torch, products in fp32 (fp64 stays)."""
    gate, up = x_N2F.to(torch.float64 if x_N2F.dtype == torch.float64 else torch.float32).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up * weight_N[:, None]).to(x_N2F.dtype)


def weighted_swiglu(x_N2F: torch.Tensor, weight_N: torch.Tensor) -> torch.Tensor:
    """`swiglu` of every row times the row's weight; not differentiable, for callers that go back by
    `weighted_swiglu_backward`.
    """
    if use_triton(x_N2F):
        from .triton.swiglu import triton_weighted_swiglu

        return triton_weighted_swiglu(x_N2F, weight_N)
    return reference_weighted_swiglu(x_N2F, weight_N)


def reference_weighted_swiglu_backward(
    x_N2F: torch.Tensor, weight_N: torch.Tensor, dy_NF: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Plain torch, products in fp32 (fp64 stays)."""
    wide = torch.float64 if x_N2F.dtype == torch.float64 else torch.float32
    gate, up = x_N2F.to(wide).chunk(2, dim=-1)
    sigmoid, dy, weight_N1 = torch.sigmoid(gate), dy_NF.to(wide), weight_N.to(wide)[:, None]
    y_NF, scaled = gate * sigmoid * up, dy * weight_N1
    dx_N2F = torch.cat([scaled * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), scaled * gate * sigmoid], dim=-1)
    return dx_N2F.to(x_N2F.dtype), (y_NF * dy).sum(-1).to(weight_N.dtype), (y_NF * weight_N1).to(x_N2F.dtype)


def weighted_swiglu_backward(
    x_N2F: torch.Tensor, weight_N: torch.Tensor, dy_NF: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(gradient of the input, gradient of the weights, the output made again); not differentiable."""
    if use_triton(x_N2F):
        from .triton.swiglu import triton_weighted_swiglu_backward

        return triton_weighted_swiglu_backward(x_N2F, weight_N, dy_NF)
    return reference_weighted_swiglu_backward(x_N2F, weight_N, dy_NF)
