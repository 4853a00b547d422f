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
        from .swiglu_triton import triton_swiglu

        return triton_swiglu(x_N2F)
    return reference_swiglu(x_N2F)
