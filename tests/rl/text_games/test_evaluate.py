"""Evaluation tables: the trivial baseline and the ceiling are in every one, invalid answers in none."""

import json

import pytest

from terrella.data.trajectory import Invalid
from terrella.rl.rewards.text_game_transition import Transition
from terrella.rl.text_games.crawl import GAMES, crawl
from terrella.rl.text_games.evaluate import (
    Model,
    accuracies,
    breakdown,
    copy_answers,
    gains,
    judge_rows,
    oracle_answers,
    table,
)
from terrella.rl.text_games.splits import split_rows


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return split_rows(
        [row for name in ("mix-colours", "grow-tomato", "weigh-stones") for row in crawl(GAMES[name], range(1))]
    ).test


def test_table_has_baseline_ceiling_and_intervals(rows: list[dict]) -> None:
    half = [a if i % 2 else "nonsense" for i, a in enumerate(oracle_answers(rows))]
    model = Model("half", judge_rows(rows, half, "strict"))
    told = table(rows, [model], "strict", "Held-out transitions")
    assert [line["kind"] for line in told["rows"]] == ["baseline", "model", "ceiling"]
    base, mine, ceiling = ([c["value"] for c in line["cells"]] for line in told["rows"])
    assert base[:2] == [1.0, 0.0] and ceiling == [1.0, 1.0, 1.0]
    assert mine[2] == pytest.approx(sum(i % 2 for i in range(len(rows))) / len(rows))
    counts = [c["n"] for c in told["rows"][1]["cells"]]
    assert counts[0] + counts[1] == counts[2] == len(rows) and base[2] == pytest.approx(counts[0] / counts[2])
    assert f"n = {len(rows)}" in told["note"] and "answers unreadable" in told["note"] and "strict" in told["title"]
    json.dumps(told)


def test_faithful_ceiling_is_below_one_and_says_so(rows: list[dict]) -> None:
    told = table(rows, [], "faithful", "t")
    creating = sum(bool(s.after.keys() - s.before.keys()) for s in map(Transition.from_row, rows))
    assert creating and told["rows"][-1]["cells"][2]["value"] == pytest.approx(1 - creating / len(rows))
    assert "below 100 %" in told["note"]


def test_invalid_is_not_wrong(rows: list[dict]) -> None:
    answers = [Invalid("the server is gone") if i < 3 else a for i, a in enumerate(oracle_answers(rows))]
    judged = judge_rows(rows, answers, "strict")
    assert accuracies(judged)[2].value == 1.0 and accuracies(judged)[2].n == len(rows) - 3
    assert "3 invalid" in table(rows, [Model("m", judged)], "strict", "t")["note"]


@pytest.mark.parametrize("by", ["game", "verb"])
def test_breakdown(rows: list[dict], by: str) -> None:
    told = breakdown(rows, Model("m", judge_rows(rows, copy_answers(rows), "strict")), "strict", by)
    inner = told["rows"][1:-1]
    assert sum(line["cells"][2]["n"] for line in inner) == len(rows)
    assert all(line["cells"][2] == line["cells"][3] for line in inner)
    with pytest.raises(ValueError, match="by"):
        breakdown(rows, Model("m", []), "strict", "colour")


def test_gains_are_paired(rows: list[dict]) -> None:
    oracle, copy = (judge_rows(rows, answers(rows), "strict") for answers in (oracle_answers, copy_answers))
    unchanged, changed, overall = gains(oracle, copy)
    assert changed.value == 1.0 and changed.low > 0.9 and unchanged.value == 0.0 and overall.n == len(rows)
    assert changed.n == sum(Transition.from_row(r).changed for r in rows)
