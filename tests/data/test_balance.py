"""Rows over data ranks: all arrive once, come home in order, and no rank has much more to do than another."""

import numpy as np
import pytest

from terrella.data.packing import plan_ranks
from terrella.tests.data.balance_jobs import cost, lengths
from terrella.tests.parallel.pool import run_ranks

HIDDEN = 1536


@pytest.mark.parametrize(
    "parallel", [{}, {"tensor": 2}, {"pipeline": 2, "virtual_pipeline": 2}], ids=["dp4", "tp2_dp2", "vpp2_dp2"]
)
def test_rows_are_spread_once_and_evenly(parallel: dict) -> None:
    found = run_ranks("terrella.tests.data.balance_jobs:spread_rows", 4, parallel=parallel, each=64, hidden=HIDDEN)
    assert all(rank["right"] for rank in found)
    copies = {rank["data_rank"]: rank for rank in found}  # peers hold the same
    assert len({rank["batches"] for rank in found}) == 1 and found[0]["batches"] % parallel.get("pipeline", 1) == 0
    assert sum(rank["tokens"] for rank in copies.values()) == sum(int((lengths(64, d) - 1).sum()) for d in copies)
    costs, own = ([rank[key] for rank in copies.values()] for key in ("cost", "own"))
    assert max(costs) / np.mean(costs) <= 1.05 < max(own) / np.mean(own)


@pytest.mark.parametrize(("ranks", "each", "worse"), [(8, 128, 1.15), (64, 64, 1.35)])
def test_long_tails_take_hardly_longer_than_the_ideal(ranks: int, each: int, worse: float) -> None:
    """What a step of ranks that train what they sampled takes of the ideal, and what it takes with the plan that the
    loop uses.
    """
    sizes = [lengths(each, rank) for rank in range(ranks)]
    whole = np.concatenate(sizes)
    shares = plan_ranks(whole, ranks=ranks, budget=16_384, hidden=HIDDEN)
    ideal = cost(whole, HIDDEN) / ranks
    assert max(cost(part, HIDDEN) for part in sizes) / ideal >= worse
    assert max(cost(np.concatenate([whole[b] for b in share]), HIDDEN) for share in shares) / ideal <= 1.05
