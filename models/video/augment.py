"""Augmentation of clips: one draw of colours and crop for all frames of a clip.

Shapes: B clips, T frames, 3 x H x W pictures in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

_TO_YIQ = ((0.299, 0.587, 0.114), (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))


def augment_clips(clips_BT3HW: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Brightness, contrast and saturation x[0.9, 1.1] and hue ±0.05 of a turn (in YIQ), and 80-100 % of the picture."""

    def draw(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    to = torch.tensor(_TO_YIQ, device=clips_BT3HW.device)
    back = torch.linalg.inv(to)
    out = []
    for clip in clips_BT3HW:
        x = clip * draw(0.9, 1.1)
        x = (x - x.mean()) * draw(0.9, 1.1) + x.mean()
        grey = (x * to[0].view(1, 3, 1, 1)).sum(1, keepdim=True)
        x = grey + (x - grey) * draw(0.9, 1.1)
        angle = 2 * math.pi * draw(-0.05, 0.05)
        cos, sin = math.cos(angle), math.sin(angle)
        turn = torch.tensor([[1.0, 0.0, 0.0], [0.0, cos, -sin], [0.0, sin, cos]], device=x.device)
        x = torch.einsum("ij,tjhw->tihw", back @ turn @ to, x).clamp(0, 1)
        out.append(_crop(x, draw))
    return torch.stack(out)


def _crop(x_T3HW: torch.Tensor, draw: Callable[[float, float], float]) -> torch.Tensor:
    """A window of 80-100 % of the area and a ratio of 1 to 1.4 of width to height, brought back to the full size."""
    H, W = x_T3HW.shape[-2:]
    area, ratio = draw(0.8, 1.0) * H * W, draw(1.0, 1.4)
    h = max(1, min(H, round(math.sqrt(area / ratio))))
    w = max(1, min(W, round(math.sqrt(area * ratio))))
    top, left = int(draw(0, H - h + 1)), int(draw(0, W - w + 1))
    top, left = min(top, H - h), min(left, W - w)
    window = x_T3HW[..., top : top + h, left : left + w]
    return F.interpolate(window, (H, W), mode="bilinear", antialias=True, align_corners=False).clamp(0, 1)
