"""The slow world, at several distances of rollouts from training. How fast it is depends on the machine: whole runs are
`full`.
"""

import pytest

from terrella.tests.parallel.pool import run_ranks

JOB = "terrella.tests.benchmarks.ahead_job:run"


def test_tokens_are_never_too_old_and_no_length_is_left_out() -> None:
    (found,) = run_ranks(JOB, 1, case="tiny", ks=[0, 2], seeds=1, steps=6, step_s=0.02)
    (sync,), (ahead,) = found[0], found[2]
    assert max(sync["oldest"]) == 0 and 0 < max(ahead["oldest"]) <= 2
    assert ahead["trajectories"] == sync["trajectories"] and len(ahead["rewards"]) == 6
    assert ahead["sampled"] == ahead["trained"] and len(ahead["trained"]) > 1


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_slow_world_costs_less_ahead_and_as_much_is_learnt() -> None:
    """Episodes of 4 to 12 turns, so that the world's time dominates: with k = 1, two steps under way, twice as many is
    the most that can be.
    """
    (found,) = run_ranks(JOB, 1, case="tiny, 4-12 turns", ks=[0, 1, 2, 4], seeds=3, steps=60, step_s=0.1)

    def mean(k: int, what: str) -> float:
        return sum(one[what] for one in found[k]) / 3

    for k in (1, 2, 4):
        assert all(max(one["oldest"]) <= k and one["sampled"] == one["trained"] for one in found[k])
        assert mean(k, "per_hour") >= 1.8 * mean(0, "per_hour")
        assert mean(k, "final") >= mean(0, "final") - 0.05
