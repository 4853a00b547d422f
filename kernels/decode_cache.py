"""What cached attention works on: the pages of a layer, the rows of a step, what a group shares, and the tiles of
the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# positions: a multiple of the keys that the attention kernels read at a time, so that each read lies in one page
PAGE = 64


@dataclass(frozen=True)
class CacheLayer:
    """Keys and values of one layer. Pages are counted from `base_2` elements behind the first element of `k` and of
    `v`.

    The offsets live on the device, so that a captured graph can be replayed on another allocation.
    """

    k: torch.Tensor
    v: torch.Tensor
    base_2: torch.Tensor


@dataclass(frozen=True)
class Rows:
    """Where N sequences stand: the pages that hold their positions, in order, and how many positions are stored.

    Page p of a layer is the p-th [G, page, D] block behind `base_2`. Sequences may share pages.
    """

    table_NP: torch.Tensor  # int32, rows of any stride
    len_N: torch.Tensor  # int64
    page: int  # positions a page

    def take(self, index: torch.Tensor) -> Rows:
        """These sequences, in this order."""
        return Rows(self.table_NP[index], self.len_N[index], self.page)


@dataclass(frozen=True)
class Tiles:
    """Several new tokens a sequence: each tile is [sequence, first token of q, tokens of the sequence before it,
    tokens].
    """

    tile_X4: torch.Tensor  # int32
    row_T: torch.Tensor  # int64: sequence of each token
    offset_T: torch.Tensor  # int64: tokens of that sequence before it in this call
    most: int  # tokens a tile


@dataclass(frozen=True)
class Shared:
    """Sequences that read their first `done_N` positions, whole pages that they share, together; -1 fills a tile."""

    rows_XR: torch.Tensor  # int32
    done_N: torch.Tensor  # int64; 0 for a sequence in no tile


def tile_tokens(per_group: int) -> int:
    """New tokens of one sequence, or sequences of one prefix, that make a tile of at most 64 rows."""
    return max(1, min(16, 64 // per_group))
