"""A vocabulary split over ranks: which columns are here, and the one collective that brings their statistics
together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist


class Shard(NamedTuple):
    """Where this rank's columns lie in the vocabulary: ids [start, start + valid) are real, columns past `valid` are
    padding.
    """

    start: int
    valid: int
    vocab: int  # of all shards together


def vocab_shard(columns: int, group: dist.ProcessGroup | None, vocab_size: int | None) -> Shard:
    rank = 0 if group is None else dist.get_rank(group)
    world = 1 if group is None else dist.get_world_size(group)
    if vocab_size is not None and not 0 < vocab_size <= columns * world:
        raise ValueError(f"vocab_size={vocab_size} does not fit {world} shards of {columns} columns")
    start = rank * columns
    total = columns * world if vocab_size is None else vocab_size
    return Shard(start, max(0, min(columns, total - start)), total)


def gather_stats(stats_N4: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's statistics, in rank order: the one collective of the vocab-parallel forward."""
    world = dist.get_world_size(group)
    out = stats_N4.new_empty((world, *stats_N4.shape))
    dist.all_gather_into_tensor(out.view(-1, stats_N4.shape[-1]), stats_N4, group=group)
    return out
