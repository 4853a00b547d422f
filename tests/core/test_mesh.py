"""What ranks tell one another, and how long they wait for it."""

from terrella.tests.parallel.pool import run_ranks


def test_ranks_wait_for_one_that_plays_longer_than_their_deadline() -> None:
    told = run_ranks("terrella.tests.core.mesh_jobs:slow_play", 4)
    assert told == [{"played": [0, 1], "made": "baselines", "after": [0, 1]}] * 4
