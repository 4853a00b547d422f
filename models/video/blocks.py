"""Convolutional encoder and decoder. Parameter names are those of the public tokenizers' files, so that weights move by
name.

Shapes: B pictures, C channels, H x W, L = H * W.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

EPS = 1e-6


class Resnet(nn.Module):
    """Two normalised convolutions beside a shortcut."""

    def __init__(self, inner: int, outer: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, inner, eps=EPS)
        self.conv1 = nn.Conv2d(inner, outer, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, outer, eps=EPS)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(inner, outer, 1) if inner != outer else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return h + (self.conv_shortcut(x) if self.conv_shortcut is not None else x)


class Downsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Block(nn.Module):
    """Resnets of one resolution, then a change of it where `change` is given."""

    def __init__(self, inner: int, outer: int, resnets: int, groups: int, change: type[nn.Module] | None) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(Resnet(inner if i == 0 else outer, outer, groups) for i in range(resnets))
        if change is not None:
            name = "downsamplers" if change is Downsample else "upsamplers"
            self.add_module(name, nn.ModuleList([change(outer)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.children():
            for part in module.children():
                x = part(x)
        return x


class SelfAttention(nn.Module):
    """One head over all places of a feature map."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, channels, eps=EPS)
        self.to_q, self.to_k, self.to_v = (nn.Linear(channels, channels) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h_BLC = self.group_norm(x).flatten(2).transpose(1, 2)
        o_BLC = F.scaled_dot_product_attention(
            self.to_q(h_BLC)[:, None], self.to_k(h_BLC)[:, None], self.to_v(h_BLC)[:, None]
        )[:, 0]
        return x + self.to_out[0](o_BLC).transpose(1, 2).reshape(x.shape)


class Middle(nn.Module):
    def __init__(self, channels: int, groups: int, attention: bool) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(Resnet(channels, channels, groups) for _ in range(2))
        self.attentions = nn.ModuleList([SelfAttention(channels, groups)] if attention else [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.resnets[0](x)
        for attention in self.attentions:
            x = attention(x)
        return self.resnets[1](x)


class CrossAttention(nn.Module):
    """From a frame's features to the context's at the same level; places are learnt, one table each."""

    def __init__(self, channels: int, places: int, heads: int, groups: int, dropout: float) -> None:
        super().__init__()
        self.att = nn.MultiheadAttention(channels, heads, dropout=dropout, batch_first=True)
        self.resid_dropout = nn.Dropout(dropout)
        self.kv_norm, self.q_norm = nn.GroupNorm(groups, channels), nn.GroupNorm(groups, channels)
        self.kv_pos_emb = nn.Parameter(torch.zeros(places, channels))
        self.q_pos_emb = nn.Parameter(torch.zeros(places, channels))

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        kv_BLC = self.kv_norm(context).flatten(2).transpose(1, 2) + self.kv_pos_emb
        q_BLC = self.q_norm(x).flatten(2).transpose(1, 2) + self.q_pos_emb
        o_BLC = self.att(q_BLC, kv_BLC, kv_BLC, need_weights=False)[0]
        return F.silu(x + self.resid_dropout(o_BLC).transpose(1, 2).reshape(x.shape))


class Encoder(nn.Module):
    """Picture to latent. With `places` (of the latent grid) it attends to a context's features after its last two
    blocks.
    """

    def __init__(
        self,
        channels: Sequence[int],
        resnets: int,
        latent: int,
        groups: int,
        *,
        attention: bool = True,
        cross: dict | None = None,
    ) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, channels[0], 3, padding=1)
        blocks = []
        for i, c in enumerate(channels):
            last = i == len(channels) - 1
            blocks.append(Block(channels[max(i - 1, 0)], c, resnets, groups, None if last else Downsample))
        self.down_blocks = nn.ModuleList(blocks)
        if cross is not None:
            self.cross_att_blocks = nn.ModuleList(CrossAttention(c, groups=groups, **cross) for c in channels[-2:])
        self.mid_block = Middle(channels[-1], groups, attention)
        self.conv_norm_out = nn.GroupNorm(groups, channels[-1], eps=EPS)
        self.conv_out = nn.Conv2d(channels[-1], latent, 3, padding=1)

    def forward(self, x: torch.Tensor, context: Sequence[torch.Tensor] = ()) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(latent, features after the last two blocks)."""
        x = self.conv_in(x)
        features = []
        first = len(self.down_blocks) - 2
        for i, block in enumerate(self.down_blocks):
            x = block(x)
            if i >= first:
                features.append(x)
                if context:
                    x = self.cross_att_blocks[i - first](x, context[i - first])
        return self.conv_out(F.silu(self.conv_norm_out(self.mid_block(x)))), features


class Decoder(nn.Module):
    """Latent to picture. With `cross` it attends to a context's features once, after the middle.

    Blocks change their width and then upsample, all but the last; with `narrow_first` the width of the next level comes
    a block earlier and every block but the first upsamples. Both orders are published: the compressive tokenizer has
    the one, the per-frame one the other.
    """

    def __init__(
        self,
        channels: Sequence[int],
        resnets: int,
        latent: int,
        groups: int,
        *,
        attention: bool = True,
        cross: dict | None = None,
        narrow_first: bool = False,
    ) -> None:
        super().__init__()
        down = list(reversed(channels))
        self.conv_in = nn.Conv2d(latent, down[0], 3, padding=1)
        self.mid_block = Middle(down[0], groups, attention)
        if cross is not None:
            self.cross_att_blocks = nn.ModuleList([CrossAttention(down[0], groups=groups, **cross)])
        widths = [*down, down[-1]] if narrow_first else [down[0], *down]
        same = 0 if narrow_first else len(down) - 1  # the block that keeps the resolution
        blocks = [
            Block(*pair, resnets, groups, None if i == same else Upsample) for i, pair in enumerate(pairwise(widths))
        ]
        self.up_blocks = nn.ModuleList(blocks)
        self.conv_norm_out = nn.GroupNorm(groups, down[-1], eps=EPS)
        self.conv_out = nn.Conv2d(down[-1], 3, 3, padding=1)

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(picture, features after the middle)."""
        x = middle = self.mid_block(self.conv_in(x))
        if context is not None:
            x = self.cross_att_blocks[0](x, context)
        for block in self.up_blocks:
            x = block(x)
        return self.conv_out(F.silu(self.conv_norm_out(x))), middle
