"""Balances a step's rows over the data ranks: each gets about the same work and the same number of microbatches,
whichever rank sampled the rows.

Answers have long tails: ranks that train what they sampled wait for the one with the longest answers, 1.3 to 1.7 x at 8
to 64 ranks. Shape suffixes: T positions of one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from ..core.batch import PackedBatch
from ..core.mesh import Mesh
from .packing import FIELDS, SequenceTable, TrainSequence, build_batch, pack, plan_ranks, unpack

PADDING = TrainSequence(np.zeros(2, np.int64))  # one position of weight 0


@dataclass(frozen=True)
class Spread:
    """This data rank's microbatches of the rows of all data ranks, and the way back to the ranks the rows came from."""

    batches: list[PackedBatch]
    mesh: Mesh
    counts: tuple[int, ...]  # rows that each data rank contributed

    def to_owners(self, values: Sequence[torch.Tensor | np.ndarray]) -> list[np.ndarray]:
        """Per-position values of the batches, sent back: one array per row that this rank contributed, aligned with its
        ids. Collective.
        """
        unpacked = unpack(self.batches, values)
        if self.mesh.data_size == 1:
            return list(unpacked.values())
        edges = np.cumsum([0, *self.counts])
        parts = [{i: v for i, v in unpacked.items() if a <= i < b} for a, b in pairwise(edges)]
        own = {i: v for part in self.mesh.exchange(parts) for i, v in part.items()}
        return [own[i] for i in sorted(own)]


def dealt(places: Sequence[int], mesh: Mesh) -> Sequence[int]:
    """This data rank's part of a step's samples, by number. Neighbours are in the same shard and go to the same rank,
    so that a rank opens few shards. A step has the same samples at any number of ranks; `spread` then balances the
    work.
    """
    return mesh.share(places if mesh.data_size == 1 else sorted(places))


def spread(rows: Sequence[TrainSequence], budget: int, mesh: Mesh, hidden: int = 2048) -> Spread:
    """Pack the rows of all data ranks into microbatches of at most `budget` positions and distribute them by cost.
    Collective.

    A rank with fewer microbatches than the others adds ones of a single padding token. At least one rank must have a
    row.
    """
    each = mesh.parallel.pipeline if mesh.parallel.virtual_pipeline > 1 else 1
    if mesh.data_size == each == 1:
        return Spread(pack(rows, budget=budget), mesh, (len(rows),))
    used = {name for row in rows for name in FIELDS if getattr(row, name) is not None}
    gathered = mesh.gather(([len(row.ids) - 1 for row in rows], used))
    counts = tuple(len(sizes) for sizes, _ in gathered)
    names = sorted(set().union(*(more for _, more in gathered)))
    plan = plan_ranks(
        np.array([n for sizes, _ in gathered for n in sizes]),
        ranks=mesh.data_size,
        budget=budget,
        hidden=hidden,
        each=each,
    )
    first = sum(counts[: mesh.data_rank])
    own = range(first, first + len(rows))
    parts = [{int(i): rows[int(i) - first] for chosen in share for i in chosen if int(i) in own} for share in plan]
    here = {i: row for part in mesh.exchange(parts) for i, row in part.items()}
    return Spread([_batch([int(i) for i in chosen], here, names) for chosen in plan[mesh.data_rank]], mesh, counts)


def _batch(chosen: list[int], rows: dict[int, TrainSequence], names: Sequence[str]) -> PackedBatch:
    """One microbatch with every field that any rank uses, so that all ranks measure the same things."""
    table = SequenceTable.of([rows[i] for i in chosen] or [PADDING])
    table.fields.update({name: np.zeros(len(table.ids_N), np.float32) for name in names if name not in table.fields})
    return replace(build_batch(table, np.arange(len(table))), sequence_ids=tuple(chosen))
