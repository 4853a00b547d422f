"""Rotary position angles for every scaling rule real checkpoints use. Shapes: P positions, R rotated dimensions of a head."""

from __future__ import annotations

import math

import torch

from .config import ModelConfig


def inverse_frequencies(config: ModelConfig, device: torch.device | str = "cpu") -> tuple[torch.Tensor, float]:
    """The R/2 inverse frequencies after scaling, and the factor that scales cos and sin (1 except for yarn)."""
    rotary = int(config.head_dim * config.rotary_fraction)
    exponent = torch.arange(0, rotary, 2, dtype=torch.float32, device=device) / rotary
    inverse = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling
    if scaling is None:
        return inverse, 1.0
    if scaling.kind == "linear":
        return inverse / scaling.factor, 1.0
    wavelength = 2 * math.pi / inverse
    original = scaling.original_positions
    if scaling.kind == "llama3":
        low, high = original / scaling.low_freq_factor, original / scaling.high_freq_factor
        smooth = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        blended = (1 - smooth) * inverse / scaling.factor + smooth * inverse
        return torch.where(wavelength > low, inverse / scaling.factor, torch.where(wavelength < high, inverse, blended)), 1.0
    turns = [
        rotary * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(config.rope_theta))
        for beta in (scaling.beta_fast, scaling.beta_slow)
    ]
    first, last = max(math.floor(turns[0]), 0), min(math.ceil(turns[1]), rotary - 1)
    ramp = ((torch.arange(rotary // 2, dtype=torch.float32, device=device) - first) / max(last - first, 1e-3)).clamp(0, 1)
    factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return inverse / scaling.factor * ramp + inverse * (1 - ramp), factor


def rope_frequencies(config: ModelConfig, positions_P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [P, R] for the half-split rotation, in fp32."""
    inverse, factor = inverse_frequencies(config, positions_P.device)
    angles = positions_P.float()[:, None] * inverse
    angles = torch.cat((angles, angles), -1)
    return angles.cos() * factor, angles.sin() * factor
