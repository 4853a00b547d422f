"""Rotary position embedding with the scalings of public checkpoints.

Shape suffixes: T tokens, H heads, D head dimension, R half of the rotated dimensions.
"""

from __future__ import annotations

import math

import torch

from .config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Frequencies (fp32) of the rotated dimension pairs, and the factor on cosine and sine."""
    rotated = int(config.head_dim * config.rotary_fraction)
    inverse_R = 1.0 / config.rope_theta ** (torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated)
    scaling = config.rope_scaling
    if scaling is None:
        return inverse_R, 1.0
    if scaling.kind == "linear":
        return inverse_R / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(inverse_R, config), 1.0
    return _yarn(inverse_R, config, rotated)


def _llama3(inverse_R: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    s = config.rope_scaling
    assert s is not None
    wavelength_R = 2 * math.pi / inverse_R
    low, high = s.original_max_positions / s.low_freq_factor, s.original_max_positions / s.high_freq_factor
    slow_R = torch.where(wavelength_R > low, inverse_R / s.factor, inverse_R)
    smooth_R = (s.original_max_positions / wavelength_R - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    blend_R = (1 - smooth_R) * slow_R / s.factor + smooth_R * slow_R
    between_R = ~(wavelength_R < high) & ~(wavelength_R > low)
    return torch.where(between_R, blend_R, slow_R)


def _yarn(inverse_R: torch.Tensor, config: ModelConfig, rotated: int) -> tuple[torch.Tensor, float]:
    s = config.rope_scaling
    assert s is not None
    original = s.original_max_positions or config.max_positions

    def dimension(rotations: float) -> float:
        return rotated * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    ramp_R = ((torch.arange(rotated // 2).float() - low) / (max(high - low, 0.001))).clamp(0, 1)
    keep_R = 1 - ramp_R
    frequencies_R = inverse_R / s.factor * (1 - keep_R) + inverse_R * keep_R
    factor = s.attention_factor
    if factor is None:
        factor = 0.1 * math.log(s.factor) + 1.0 if s.factor > 1 else 1.0
    return frequencies_R, factor


def rotation_table(positions_T: torch.Tensor, inverse_R: torch.Tensor, factor: float) -> torch.Tensor:
    """(T, 2R) fp32: the cosines of every token, then the sines."""
    angle_TR = positions_T[:, None].float() * inverse_R[None, :]
    table_T2R = torch.cat([angle_TR.cos(), angle_TR.sin()], -1)
    return table_T2R * factor if factor != 1.0 else table_T2R


def rotate(x_THD: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the first 2R dimensions: as two halves, or as neighbouring pairs when `interleaved`."""
    r = cos_T1R.shape[-1]
    rest = x_THD[..., 2 * r :]
    if interleaved:
        a, b = x_THD[..., 0 : 2 * r : 2], x_THD[..., 1 : 2 * r : 2]
        turned = torch.stack([a * cos_T1R - b * sin_T1R, b * cos_T1R + a * sin_T1R], -1).flatten(-2)
        return torch.cat([turned, rest], -1) if rest.shape[-1] else turned
    a, b = x_THD[..., :r], x_THD[..., r : 2 * r]
    pieces = [a * cos_T1R - b * sin_T1R, b * cos_T1R + a * sin_T1R]
    return torch.cat([*pieces, rest] if rest.shape[-1] else pieces, -1)
