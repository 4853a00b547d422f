"""Rotary position embedding on packed tokens, half-split pairing (dimension i with i + R/2), of the first R dimensions
of a head.

Shape suffixes: T tokens, A attention heads, D head dimension, R rotated dimensions, P positions of the table.
"""

from __future__ import annotations

import torch

from .dispatch import use_triton


def rope_table(positions: int, rotated: int, *, theta: float = 10000.0) -> torch.Tensor:
    """[P, R] fp32: R/2 cosines, then R/2 sines."""
    inverse_h = theta ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * inverse_h[None, :]
    return torch.cat([angle.cos(), angle.sin()], dim=1).float()


def reference_rope(x_TAD: torch.Tensor, table_PR: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
    """Plain torch, products in fp32 (fp64 stays)."""
    rotated = table_PR.shape[1]
    wide = torch.float64 if x_TAD.dtype == torch.float64 else torch.float32
    cos_T1h, sin_T1h = table_PR[positions_T].to(wide)[:, None, :].chunk(2, dim=-1)
    first, second = x_TAD[..., :rotated].to(wide).chunk(2, dim=-1)
    turned = torch.cat([first * cos_T1h - second * sin_T1h, second * cos_T1h + first * sin_T1h], dim=-1).to(x_TAD.dtype)
    return torch.cat([turned, x_TAD[..., rotated:]], dim=-1)


def rope(x_TAD: torch.Tensor, table_PR: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
    """Rotate every head by its token's own position, so that documents packed end to end each start at theirs."""
    if use_triton(x_TAD):
        from .triton.rope import triton_rope

        return triton_rope(x_TAD, table_PR, positions_T)
    return reference_rope(x_TAD, table_PR, positions_T)
