"""Scores of agents: what is compared is paired by seed, and Invalid samples are left out."""

import math

from terrella.data.trajectory import Invalid, Trajectory
from terrella.rl.agents.evaluate import difference, summarise

INFO = {"action_is_effective": 1.0, "response_tokens": 3.0, "format_ok": 1.0, "num_actions": 2.0}


def played(*outcomes: bool | None) -> list[Trajectory]:
    """One sample of each seed; None for an Invalid one."""
    return [
        Trajectory(seed, 0, [], Invalid("lost"))
        if won is None
        else Trajectory(seed, 0, [], float(won), info={**INFO, "success": won})
        for seed, won in enumerate(outcomes)
    ]


def test_a_difference_is_paired_by_seed_and_not_by_place() -> None:
    one, other = summarise(played(True, False, None)), summarise(played(None, True, False))
    assert (difference(one, other).value, difference(one, other).n) == (-1.0, 1)  # of seed 1 alone
    assert one.invalid == 1 and one.seeds == [0, 1]
    whole = difference(one, summarise(played(True, True, True)))
    assert (whole.value, whole.n) == (-0.5, 2)
    nothing = difference(summarise(played(True, None)), summarise(played(None, True)))
    assert nothing.n == 0 and math.isnan(nothing.value)
