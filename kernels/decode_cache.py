"""What cached attention works on: the pages of a layer, the rows of a step, what a group shares, and the tiles of the kernels."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class CacheLayer:
    """Keys and values of one layer. Region starts count from `base_2` elements behind the first element of `k` and of `v`.

    The offsets live on the device, so that a captured graph can be replayed on another allocation.
    """

    k: torch.Tensor
    v: torch.Tensor
    base_2: torch.Tensor


@dataclass(frozen=True)
class Rows:
    """Where N sequences stand, int64: their regions, and how many tokens of their own are stored."""

    prefix_start_N: torch.Tensor
    prefix_len_N: torch.Tensor
    own_start_N: torch.Tensor
    own_cap_N: torch.Tensor
    own_len_N: torch.Tensor

    def take(self, index: torch.Tensor) -> Rows:
        """These sequences, in this order."""
        return Rows(*(getattr(self, f.name)[index] for f in fields(self)))


@dataclass(frozen=True)
class Tiles:
    """Several new tokens a sequence: each tile is [sequence, first token of q, tokens of the sequence before it, tokens]."""

    tile_X4: torch.Tensor  # int32
    row_T: torch.Tensor  # int64: sequence of each token
    offset_T: torch.Tensor  # int64: tokens of that sequence before it in this call
    most: int  # tokens a tile


@dataclass(frozen=True)
class Shared:
    """Sequences that read the first `done_N` positions of one prefix together; -1 fills a tile."""

    rows_XR: torch.Tensor  # int32
    done_N: torch.Tensor  # int64; 0 for a sequence in no tile


def tile_tokens(per_group: int) -> int:
    """New tokens of one sequence, or sequences of one prefix, that make a tile of at most 64 rows."""
    return max(1, min(16, 64 // per_group))
