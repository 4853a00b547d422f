"""Rows, prompts and sampling: the public sample's counts and digests, and the same rules on rows of our own."""

import hashlib
import json
import os
from collections import Counter
from pathlib import Path

import pytest

from terrella.core.errors import ConfigError
from terrella.data.convert.text_game import Prompts, difference, is_changed, is_gold
from terrella.rl.rewards.text_game import state_difference
from terrella.rl.rewards.text_game_transition import Transition
from terrella.rl.text_games.rows import action_of, changed_by_action, verb_of
from terrella.rl.text_games.splits import RatioSampler, not_learnt, split_rows, thinned
from terrella.tests.rl.text_games.row_faults import loose_names, row_faults

DIGESTS = json.loads((Path(__file__).parent / "digests.json").read_text())


def digest(values: list) -> str:
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


@pytest.fixture(scope="module")
def public() -> tuple[Path, list[dict]]:
    root = os.environ.get("TERRELLA_SHARED_DATA")
    if not root:
        pytest.skip(
            "set TERRELLA_SHARED_DATA to the folder that holds bytesized32/ (its licence does not let us ship it)"
        )
    folder = Path(root) / "bytesized32"
    return folder, [json.loads(line) for line in (folder / "test_sample.jsonl").read_text().splitlines()]


def test_the_public_sample(public: tuple[Path, list[dict]]) -> None:
    """442 rows: both implementations of the rules agree, and digests of rows and answers are the shipped ones."""
    folder, rows = public
    assert len(rows) == 442 and not any(row_faults(row) or loose_names(row) for row in rows)
    assert [is_gold(r) for r in rows] == [Transition.from_row(r).gold for r in rows] and sum(map(is_gold, rows)) == 246
    assert [is_changed(r) for r in rows] == [Transition.from_row(r).changed for r in rows] and sum(
        map(is_changed, rows)
    ) == 268
    assert [difference(r) for r in rows] == [state_difference(Transition.from_row(r)) for r in rows]
    assert digest([[r["game"], r["state_id"]] for r in rows]) == DIGESTS["rows"]
    assert digest([difference(r) for r in rows]) == DIGESTS["differences"]
    verbs = Counter(verb_of(action_of(r)) for r in rows)
    assert (verbs["take"], verbs["turn on"], len(verbs)) == (109, 16, 41)
    dynamic = json.loads((folder / "dynamic_states.json").read_text())
    assert [changed_by_action(r) for r in rows] == [r["state_id"] in dynamic[r["game"]]["action_change"] for r in rows]


def test_prompts_of_the_public_sample(public: tuple[Path, list[dict]]) -> None:
    folder, rows = public
    prompts = Prompts.from_files(folder / "rules_human_written", folder / "examples.json")
    texts = [prompts(row) for row in rows]
    assert digest(texts) == DIGESTS["prompts"]
    for row, text in zip(rows, texts, strict=True):
        state = {"game_state": [*row["current_state"]["objects"], row["current_score_state"]]}
        marks = [
            "uuid",
            "`modified`",
            "tick",
            "Example A",
            "Expected answer:",
            "Example B",
            "Now the game",
            row["current_state"]["taskDesc"],
            "Actions and their rules",
            "How the score is kept",
            repr(state),
            f"UUID base: {row['current_state']['max_UUID']}",
            f"Action: {action_of(row)}",
            "The final answer is:",
        ]
        at = 0
        for mark in marks:  # each after the one before it
            at = text.index(mark, at) + len(mark)
        assert "=" * 10 not in text and row["current_state"]["look"] not in text


def state(action: str, things: list[dict]) -> dict:
    texts = {"observation": "", "look": "", "inventory": "", "taskDesc": "play"}
    return {**texts, "lastAction": action, "objects": things, "max_UUID": 10}


def row(
    number: int, verb: str = "take", *, acted: bool = False, ticked: bool = False, score: int = 0, order: bool = False
) -> dict:
    def room(value: int, names: list[str]) -> list[dict]:
        return [{"name": "room (ID: 1)", "uuid": 1, "type": "Room", "properties": {"n": value}, "contains": names}]

    names = ["a (ID: 2)", "b (ID: 3)"]
    kept = {"score": 0, "gameOver": False, "gameWon": False}
    return {
        "game": "g",
        "state_id": number,
        "current_state": state("", room(number * 10, names)),
        "action_state": state(f"{verb} it", room(number * 10 + acted, names)),
        "tick_state": state(f"{verb} it", room(number * 10 + acted + 2 * ticked, names[::-1] if order else names)),
        "current_score_state": kept,
        "next_score_state": {**kept, "score": score},
    }


def test_rules_by_hand() -> None:
    cases = [row(0), row(1, acted=True), row(2, ticked=True), row(3, score=1), row(4, order=True)]
    assert [is_changed(r) for r in cases] == [False, True, True, True, False]
    assert [is_gold(r) for r in cases] == [False, True, True, False, False]
    assert [changed_by_action(r) for r in cases] == [False, True, False, False, False]
    assert difference(cases[3]) == {
        "modified": [],
        "removed": [],
        "score": {"score": 1, "gameOver": False, "gameWon": False},
    }
    assert len(difference(cases[4])["modified"]) == 1  # another order is written down, and judged equal


def test_faults_are_named() -> None:
    good = row(0)
    assert row_faults(good) == []
    assert row_faults({**good, "state_id": "0"}) == ["state_id: expected integer, found str"]
    twice = state("", good["current_state"]["objects"] * 2)
    assert row_faults({**good, "tick_state": twice}) == ["tick_state: a uuid appears twice"]
    low = {**good["current_state"], "max_UUID": 1}
    assert row_faults({**good, "current_state": low}) == ["current_state: uuid 1 is not below max_UUID 1"]
    assert len(loose_names(good)) == 6  # a and b are no objects, in three states


@pytest.mark.parametrize(
    ("action", "verb"),
    [("turn on lamp (ID: 2)", "turn on"), ("turn page", "turn"), ("put a (ID: 1) in b (ID: 2)", "put"), ("", "")],
)
def test_verbs(action: str, verb: str) -> None:
    assert verb_of(action) == verb


def test_split_holds_out_five_and_five_of_a_verb() -> None:
    rows = [row(i, verb, acted=i % 2 == 0) for i, verb in enumerate(["take", "put"] * 40)]
    rows += [{**row(100 + i), "game": "new"} for i in range(3)]
    split = split_rows(rows, unseen_games=["new"])
    counts = Counter((verb_of(action_of(r)), changed_by_action(r)) for r in split.test)
    assert counts == {("take", True): 5, ("put", False): 5}  # here a verb either always or never changes something
    assert len(split.train) == 70 and len(split.unseen_games) == 3
    assert (
        split == split_rows(rows, unseen_games=["new"])
        and split.test != split_rows(rows, unseen_games=["new"], seed=1).test
    )


def test_every_kind_keeps_at_most_so_many_rows() -> None:
    rows = [row(i, "take", acted=i % 3 == 0) for i in range(60)] + [row(80 + i, "put") for i in range(2)]
    kept = thinned(rows, 5)
    counts = Counter((verb_of(action_of(r)), changed_by_action(r)) for r in kept)
    assert counts == {("take", True): 5, ("take", False): 5, ("put", False): 2}
    assert kept == [r for r in rows if r in kept] == thinned(rows, 5) and kept != thinned(rows, 5, seed=1)


def test_a_verb_that_is_held_out_whole_is_named() -> None:
    rows = [row(i, "take") for i in range(9)] + [row(20 + i, "put") for i in range(5)]
    assert not_learnt(split_rows(rows, each=4)) == []
    missing = not_learnt(split_rows(rows, each=5))
    assert len(missing) == 1 and ": put, " in missing[0]


def test_a_held_out_question_is_not_trained_on() -> None:
    rows = [row(1, acted=True) | {"state_id": i} for i in range(20)]
    split = split_rows(rows)
    assert len(split.test) == 5 and split.train == []


def test_ratio_sampling_is_a_function_of_the_place() -> None:
    gold = [i < 10 for i in range(40)]
    sampler = RatioSampler(gold, 0.4, seed=3)
    assert len(sampler) == 14
    first = [sampler[i] for i in range(28)]
    for epoch in (first[:14], first[14:]):
        assert sorted(i for i in epoch if i < 10) == list(range(10)) and sum(i >= 10 for i in epoch) == 4
    assert first[:14] != first[14:]
    fresh = RatioSampler(gold, 0.4, seed=3)
    assert [fresh[i] for i in (27, 3, 14)] == [first[27], first[3], first[14]]
    drawn = [RatioSampler(gold, 0.1, seed=0)[i] for i in range(11 * 60)]
    assert len({i for i in drawn if i >= 10}) > 15  # drawn anew each epoch, not a fixed subset
    with pytest.raises(ConfigError, match=r"env.non_gold_ratio: no row to train on has a changed object"):
        RatioSampler([False], 0.4)
    with pytest.raises(ConfigError, match=r"env.non_gold_ratio = 0.4: every row to train on has a changed object"):
        RatioSampler([True] * 5, 0.4)
