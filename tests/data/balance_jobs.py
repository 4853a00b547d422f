"""A step's rows on the ranks of the pool. Helper module, not a test."""

from __future__ import annotations

from typing import Any

import numpy as np


def lengths(count: int, seed: int) -> np.ndarray:
    """Answers with a long tail, as a model that thinks gives them: most are short, one in a hundred is twenty times
    as long.
    """
    return np.clip(np.random.default_rng(seed).lognormal(6.0, 1.0, count), 16, 16_000).astype(int)


def cost(sizes: np.ndarray, hidden: int) -> float:
    """What a layer computes for rows of these sizes, in tokens."""
    return float((sizes + sizes.astype(float) ** 2 / (12 * hidden)).sum())


def spread_rows(parallel: dict[str, Any], each: int, hidden: int) -> dict[str, Any]:
    """Every data rank brings `each` rows; what it works on afterwards, and what comes home from it."""
    import torch.distributed as dist

    from terrella.core.config import ParallelConfig
    from terrella.core.mesh import Mesh
    from terrella.data.balance import spread
    from terrella.data.packing import TrainSequence

    mesh = Mesh(dist.get_rank(), dist.get_world_size(), ParallelConfig(**parallel))
    sizes = lengths(each, mesh.data_rank)
    # every id names its row and its place in it, so that a value can be followed
    rows = [
        TrainSequence(
            (np.arange(n) + 100_000 * (1000 * mesh.data_rank + i)).astype(np.int64),
            ce=np.append(0, np.ones(n - 1)).astype(np.float32),
        )
        for i, n in enumerate(sizes)
    ]
    found = spread(rows, 16_384, mesh, hidden)
    home = found.to_owners([batch.targets_T for batch in found.batches])
    right = all((value[1:] == row.ids[1:]).all() for value, row in zip(home, rows, strict=True)) and len(home) == len(
        rows
    )
    worked = [np.diff(batch.cu_seqlens_D1.numpy())[: len(batch.sequence_ids)] for batch in found.batches]
    return {
        "data_rank": mesh.data_rank,
        "right": right,
        "tokens": sum(int(batch.ce_weight_T.sum()) for batch in found.batches),
        "batches": len(found.batches),
        "own": cost(sizes - 1, hidden),
        "cost": sum(cost(w, hidden) for w in worked),
    }
