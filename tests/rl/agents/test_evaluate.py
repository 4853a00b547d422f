"""Scores of agents: what is compared is paired by seed, and Invalid samples are left out."""

import math
from types import SimpleNamespace

import pytest

from terrella.data.trajectory import Invalid, Trajectory
from terrella.rl.agents import results
from terrella.rl.agents.evaluate import difference, summarise
from terrella.rl.evaluation import Evaluation
from terrella.rl.statistics import proportion

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


def test_an_arm_alone_is_compared_with_the_random_policy_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(*names: str, random: int) -> tuple[str, str]:
        chance = proportion(random, 100)
        rows = [("random policy", "baseline", chance, chance)]
        monkeypatch.setattr(results, "baseline_rows", lambda *_: rows)
        won = {
            "arm": [[t] for t in played(*[i < 20 for i in range(100)])],
            "other": [[t] for t in played(*[False] * 100)],
        }
        judged = {(name, t, "room"): won[name] for name in names for t in (1.0, 0.0)}
        tasks = {"room": [SimpleNamespace(seed=i, task=None) for i in range(100)]}
        shown = {(name, "room"): name for name in names}
        asked = Evaluation([*names], [1.0, 0.0], 1, tasks, judged, after="arm", shown=shown)
        summary = results.AgentResults(asked).summary()
        return summary["headline"], " ".join(summary["paragraphs"])

    headline, text = told("arm", random=45)
    assert headline == "room: arm solves 20.0 % (±7.9) at the first try." and "ahead of" not in text
    assert "Baseline: random policy 45.0 % (±9.6), above arm." in text
    headline, text = told("arm", "other", random=25)
    assert (
        headline.endswith("; ahead of other beyond chance.") and "arm is ahead of every other arm beyond chance" in text
    )
    assert "Baseline: random policy 25.0 % (±8.4)." in text
