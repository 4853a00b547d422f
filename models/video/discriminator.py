"""The adversary of tokenizer training: patch logits, hinge loss, and a gradient penalty on real frames.

Shapes: B pictures, 3 x H x W in [0, 1].
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

WIDTHS = (64, 128, 256, 512, 512, 512)


class PatchDiscriminator(nn.Module):
    """Strided convolutions with spectral norm; a logit for every patch. `widths` gives one layer each."""

    def __init__(self, widths: tuple[int, ...] = WIDTHS) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, (inner, outer) in enumerate(pairwise((3, *widths))):
            layers.append(spectral_norm(nn.Conv2d(inner, outer, 3, stride=2, padding=1)))
            if i:
                layers.append(nn.InstanceNorm2d(outer))
            layers.append(nn.LeakyReLU(0.2))
        self.body = nn.Sequential(*layers)
        self.head = spectral_norm(nn.Conv2d(widths[-1], 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def layers_for(height: int, width: int) -> tuple[int, ...]:
    """As many of the six layers as leave at least 4 patches a side, which instance norm needs."""
    count = 1
    while count < len(WIDTHS) and min(height, width) >> (count + 1) >= 4:
        count += 1
    return WIDTHS[:count]


def hinge_loss(real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """What the discriminator minimises."""
    return (F.relu(1.0 - real).mean() + F.relu(1.0 + fake).mean()) / 2


def gradient_penalty(discriminator: nn.Module, real: torch.Tensor) -> torch.Tensor:
    """(|gradient| - 1)^2 at the real pictures, averaged over them."""
    real = real.detach().float().requires_grad_(True)
    with torch.autocast(real.device.type, enabled=False):
        (gradient,) = torch.autograd.grad(discriminator(real).sum(), real, create_graph=True)
    return ((gradient.flatten(1).norm(dim=1) - 1.0) ** 2).mean()
