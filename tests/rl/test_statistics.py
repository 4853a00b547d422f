"""Intervals: known values, and coverage on simulated data."""

import math
import random

import pytest

from terrella.launch.report.tables import values_of
from terrella.rl.evaluation import Evaluation, percent, points, reward_results
from terrella.rl.statistics import (
    mean,
    mean_change,
    mean_of_proportions,
    mean_or_share,
    mean_share,
    paired_difference,
    proportion,
)


def test_wilson_interval_known_values() -> None:
    half = proportion(50, 100)
    assert (half.low, half.high) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    none = proportion(0, 20)
    assert none.low == 0.0 and none.high == pytest.approx(0.1611, abs=1e-4)
    assert math.isnan(proportion(0, 0).value)


def test_mean_interval_and_pairs() -> None:
    estimate = mean([1.0, 2.0, 3.0, 4.0])
    assert estimate.value == 2.5 and estimate.high - estimate.value == pytest.approx(
        1.96 * math.sqrt(5 / 3 / 4), rel=1e-3
    )
    assert math.isinf(mean([1.0]).high)


def test_shares_that_are_all_equal_have_an_interval() -> None:
    for share in (mean_share, mean_or_share):
        assert share([0.0] * 20) == proportion(0, 20) and share([1.0] * 20) == proportion(20, 20)
        assert share([0.5] * 4).low == share([0.5] * 4).high == 0.5  # no share of 0 or 1: as before
        assert share([0.0, 1.0, 1.0]).value == mean([0.0, 1.0, 1.0]).value
    assert mean_or_share([0.0, 1.0, 1.0]) == mean([0.0, 1.0, 1.0])
    assert mean_share([1.0]).low == 0.0 and mean_share([1.0]).high == 1.0
    assert math.isnan(mean_share([]).value)


def test_a_table_of_rewards_tells_shares_from_other_numbers() -> None:
    """All of a model's answers right: an interval of shares, and none where rewards may be above 1."""
    tasks = {"test": ["a", "b", "c", "d"]}
    judged = {("one", 0.0, "test"): [[1.0]] * 4, ("other", 0.0, "test"): [[0.0], [1.0], [0.0], [0.0]]}
    evaluation = Evaluation(["one", "other"], [0.0], 1, tasks, judged, "other", "one")
    told = reward_results(evaluation, lambda asked: {"empty answer": [[0.0]] * 4})
    cells = {row["name"]: row["cells"][0] for row in told.tables[""]["rows"]}
    assert cells["one"] == proportion(4, 4).to_cell() and cells["empty answer"] == proportion(0, 4).to_cell()
    assert cells["other"] == mean([0.0, 1.0, 0.0, 0.0]).to_cell()
    assert told.summary is not None and "1.000 (0.510 to 1.000) after" in told.summary["headline"]
    paid = reward_results(evaluation, lambda asked: {"oracle": [[10.0]] * 4})
    assert paid.tables[""]["rows"][1]["cells"][0] == mean([1.0] * 4).to_cell()


def test_equal_rewards_are_said_to_be_equal_and_not_to_be_certain() -> None:
    tasks = {"test": ["a", "b", "c", "d"]}
    judged = {("one", 0.0, "test"): [[0.1], [0.1], [0.1], [0.1]], ("other", 0.0, "test"): [[0.1], [0.1], [0.1], [0.1]]}
    told = reward_results(Evaluation(["one", "other"], [0.0], 1, tasks, judged, "other", "one"), lambda asked: {})
    assert told.summary is not None and "0.100 (all equal) before, 0.100 (all equal) after" in told.summary["headline"]
    cell = told.tables[""]["rows"][0]["cells"][0]
    assert values_of(cell) == {"value": cell["value"], "low": None, "high": None, "n": 4}
    apart = mean([0.1, 0.1 + 1e-9]).to_cell()
    assert values_of(apart) == apart
    assert percent(mean([0.5, 0.5])) == "50.0 % (all equal)" and points(mean([0.5, 0.5])) == "+50.0 points (all equal)"
    assert percent(proportion(4, 4)) == "100.0 % (±24.5)"


def test_paired_difference() -> None:
    change = paired_difference([True] * 30 + [False] * 70, [True] * 10 + [False] * 90)
    assert change.value == pytest.approx(0.2)
    up, down = 21 / 102, 1 / 102
    half = 1.959964 * math.sqrt((up + down - (up - down) ** 2) / 102)
    assert (change.low, change.high) == pytest.approx((up - down - half, up - down + half), rel=1e-5)
    same = paired_difference([True, False] * 8, [True, False] * 8)
    assert same.value == 0.0 and same.low < -0.05 and same.high > 0.05  # no difference seen is not certainty


def test_changes_that_are_all_alike_are_not_certain() -> None:
    wins = [True, False, True, True]
    assert mean_change([1.0] * 4) == paired_difference([True] * 4, [False] * 4)
    assert mean_change([-1.0] * 4) == paired_difference([False] * 4, [True] * 4)
    assert mean_change([0.0] * 4) == paired_difference(wins, wins)
    for other in ([0.5, 0.5], [1.0], [], [1.0, 0.0]):  # what is no count of pairs, or has a width of its own
        assert str(mean_change(other)) == str(mean(other))


def test_intervals_cover_the_truth_about_95_times_in_100() -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(2000):
        estimate = proportion(sum(rng.random() < 0.3 for _ in range(200)), 200)
        hits += estimate.low <= 0.3 <= estimate.high
    assert 0.935 <= hits / 2000 <= 0.965


def test_a_mean_of_proportions_weighs_both_alike_and_covers_the_truth() -> None:
    one = mean_of_proportions([proportion(90, 100), proportion(5, 10)])
    assert one.value == 0.7 and one.n == 110 and 0 <= one.low < 0.6 and 0.8 < one.high <= 1
    assert mean_of_proportions([proportion(10, 10), proportion(10, 10)]).high == 1.0
    rng, held = random.Random(4), 0
    for _ in range(400):
        parts = [proportion(sum(rng.random() < p for _ in range(n)), n) for p, n in ((0.9, 150), (0.7, 60))]
        found = mean_of_proportions(parts)
        held += found.low <= 0.8 <= found.high
    assert 0.92 < held / 400 < 0.985
