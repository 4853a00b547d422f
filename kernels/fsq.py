"""Finite scalar quantisation: each latent dimension is squashed and rounded to one of its levels; the code is the
mixed-radix index.

Shape suffixes: N latents, C latent dimensions (one per level count).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .dispatch import use_triton
from .fsq_levels import fsq_constants


def reference_fsq_quantize(z_NC: torch.Tensor, levels: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch in fp32 (fp64 stays), straight-through rounding."""
    half, offset, shift, width, basis = (torch.tensor(c, device=z_NC.device) for c in fsq_constants(levels))
    wide = torch.float64 if z_NC.dtype == torch.float64 else torch.float32
    bounded_NC = torch.tanh(z_NC.to(wide) + shift.to(wide)) * half.to(wide) - offset.to(wide)
    level_NC = bounded_NC + (bounded_NC.round() - bounded_NC).detach()
    index_N = ((level_NC.detach().round().long() + width) * basis).sum(-1)
    # NaN has no level: an index outside the codebook says so
    return level_NC / width, torch.where(bounded_NC.detach().isnan().any(-1), torch.full_like(index_N, -1), index_N)


def fsq_quantize(z_NC: torch.Tensor, levels: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(code in [-1, 1] with a straight-through gradient, index); the arithmetic is fp32 whatever the input. A NaN
    latent gets index -1.
    """
    if z_NC.shape[-1] != len(levels):
        raise ValueError(f"the latent has {z_NC.shape[-1]} dimensions but levels names {len(levels)}")
    if use_triton(z_NC):
        from .triton.fsq import triton_fsq_quantize

        return triton_fsq_quantize(z_NC, tuple(levels))
    return reference_fsq_quantize(z_NC, levels)


def reference_fsq_dequantize(index_N: torch.Tensor, levels: Sequence[int]) -> torch.Tensor:
    """Plain torch."""
    _, _, _, width, basis = (torch.tensor(c, device=index_N.device) for c in fsq_constants(levels))
    level_NC = (index_N[..., None] // basis) % torch.tensor(levels, device=index_N.device)
    return (level_NC - width) / width


def fsq_dequantize(index_N: torch.Tensor, levels: Sequence[int]) -> torch.Tensor:
    """fp32 codes of the indices; an index outside the codebook raises on CPU and gives NaN on CUDA."""
    if use_triton(index_N):
        from .triton.fsq import triton_fsq_dequantize

        return triton_fsq_dequantize(index_N, tuple(levels))
    if index_N.numel() and (int(index_N.min()) < 0 or int(index_N.max()) >= math.prod(levels)):
        raise ValueError(
            f"FSQ index outside the codebook of {math.prod(levels)}: {int(index_N.min())}..{int(index_N.max())}"
        )
    return reference_fsq_dequantize(index_N, levels)
