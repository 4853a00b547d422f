"""What a video tokenizer is: its sizes. Importable without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

# codebooks by bits, as published with finite scalar quantisation
LEVELS = {8: [8, 6, 5], 10: [8, 5, 5, 5], 12: [7, 5, 5, 5, 5], 14: [8, 8, 8, 6, 5], 16: [8, 8, 8, 5, 5, 5]}


@dataclass(frozen=True)
class TokenizerConfig:
    """`frame`: every frame by itself. `compressive`: one context frame in full, the others by few tokens beside it.

    The defaults are the per-frame tokenizer of RT-1; `RT1_COMPRESSIVE` is the other.
    """

    kind: Literal["frame", "compressive"] = "frame"  # each frame by itself, or frames beside one context frame
    height: int = 256  # of a picture, in pixels
    width: int = 320  # of a picture, in pixels
    # one block each; all but the last halve the picture
    channels: list[int] = field(default_factory=lambda: [128, 256, 256, 512, 768])
    encoder_resnets: int = 2  # residual layers of each encoder block
    decoder_resnets: int = 2  # residual layers of each decoder block
    latent: int = 64  # channels of the latent before quantisation
    groups: int = 32  # of the normalisation
    levels: list[int] = field(default_factory=lambda: LEVELS[12])  # of the quantiser
    patch: int = 4  # compressive: latents of a patch of this side become one token
    heads: int = 4  # compressive: of the attention to the context
    dropout: float = 0.1  # of the residual layers, in training
    # for a camera that stands still: frames are drawn upon their context, it upon a learnt picture; not published
    still: bool = False

    def __post_init__(self) -> None:
        if len(self.channels) < 2 or not self.levels or min(self.levels) < 2:
            raise ValueError("channels: at least two blocks, and levels of at least 2 each, are needed")
        for name in ("height", "width", "encoder_resnets", "decoder_resnets", "latent", "groups", "patch", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: {self.dropout} must be at least 0 and below 1")
        for name in ("height", "width"):
            if getattr(self, name) % (self.shrink * (self.patch if self.kind == "compressive" else 1)):
                raise ValueError(
                    f"{name}: {getattr(self, name)} must be a multiple of {self.shrink} (times patch when compressive)"
                )
        for c in self.channels:
            if c < 1 or c % self.groups or (self.kind == "compressive" and c % self.heads):
                raise ValueError(f"channels: {c} must be a multiple of groups ({self.groups}) and heads ({self.heads})")

    @property
    def shrink(self) -> int:
        """Pixels of a latent's side."""
        return 2 ** (len(self.channels) - 1)

    @property
    def grid(self) -> tuple[int, int]:
        """Latents of a picture: rows, columns."""
        return self.height // self.shrink, self.width // self.shrink

    @property
    def codebook(self) -> int:
        return math.prod(self.levels)

    @property
    def frame_tokens(self) -> int:
        rows, columns = self.grid
        return rows * columns // (self.patch**2 if self.kind == "compressive" else 1)

    @property
    def context_tokens(self) -> int:
        """0 for a per-frame tokenizer, which has no context frame."""
        return math.prod(self.grid) if self.kind == "compressive" else 0


@dataclass(frozen=True)
class TokenizerLoss:
    """Weights of the terms. The published run has lpips 1, adversary 0.1 from step 10,000, penalty 10."""

    l1: float = 1.0  # weight of the mean absolute error of pixels
    # tokenizers with `still`: weight of the mean L1 of those pixels that differ from the picture they are drawn upon
    moved: float = 0.0
    lpips: float = 1.0  # needs its weights; 0 leaves them out
    net: Literal["alex", "vgg"] = "vgg"  # network of the LPIPS term
    adversary: float = 0.1  # 0 trains none
    adversary_from: int = 10_000  # the step at which the adversary begins to count
    penalty: float = 10.0  # weight of the adversary's gradient penalty

    def __post_init__(self) -> None:
        for name in ("l1", "moved", "lpips", "adversary", "penalty"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)} must not be negative")


RT1_FRAME = TokenizerConfig()
RT1_COMPRESSIVE = TokenizerConfig(kind="compressive", channels=[128, 256, 256, 512], decoder_resnets=3)
