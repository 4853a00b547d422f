"""The slow world, at several distances of rollouts from training. How fast it is depends on the machine: whole runs are
`full`.
"""

import pytest

from terrella.benchmarks import record
from terrella.benchmarks.ahead import merged
from terrella.tests.parallel.pool import run_ranks

JOB = "terrella.tests.benchmarks.ahead_job:run"


def test_tokens_are_never_too_old_and_no_length_is_left_out() -> None:
    (found,) = run_ranks(JOB, 1, case="tiny", ks=[0, 2], seeds=1, steps=6, step_s=0.02)
    (sync,), (ahead,) = found[0], found[2]
    assert max(sync["oldest"]) == 0 and 0 < max(ahead["oldest"]) <= 2
    assert ahead["trajectories"] == sync["trajectories"] and len(ahead["rewards"]) == 6
    assert ahead["sampled"] == ahead["trained"] and len(ahead["trained"]) > 1


def test_seeds_of_several_commands_become_one_row() -> None:
    def seed(value: float, impl: str = "terrella, ahead 1") -> record.Row:
        rows = record.Recorder("ahead", "command", "", "", "abc", "run")
        return rows.add("case", impl, "trajectories", value, "1/h", value, value)

    both, other = merged([seed(3.0), seed(7.0, "terrella, ahead 2"), seed(1.0), seed(2.0)])
    assert (both.value, both.p20, both.p80) == (2.0, 1.0, 3.0)
    assert (other.impl, other.value) == ("terrella, ahead 2", 7.0)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_slow_world_costs_less_ahead_and_as_much_is_learnt() -> None:
    """Episodes of 8 to 12 turns, so that the world's time dominates: with k = 1, two steps under way, twice as many is
    the most that can be. Learning is over in all of them.
    """
    (found,) = run_ranks(JOB, 1, case="tiny, 8-12 turns", ks=[0, 1, 2, 4], seeds=3, steps=120, step_s=0.1)

    def mean(k: int, what: str) -> float:
        return sum(one[what] for one in found[k]) / 3

    assert all(abs(one["final"] - one["before"]) < 0.03 for outcomes in found.values() for one in outcomes)
    for k in (1, 2, 4):
        assert all(max(one["oldest"]) <= k and one["sampled"] == one["trained"] for one in found[k])
        assert mean(k, "per_hour") >= 1.8 * mean(0, "per_hour")
        assert mean(k, "final") >= mean(0, "final") - 0.02
