"""Text-game rewards: golden counts on the public sample, the same blind spots on cases of our own, hostile answers,
speed.
"""

import json
import os
import re
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrella.rl.rewards.loose_json import Unreadable, read_mapping
from terrella.rl.rewards.text_game import extract_answer, judge, judge_difference, state_difference
from terrella.rl.rewards.text_game_transition import Transition

EMPTY = '{"modified": [], "removed": [], "score": {}}'
SCORE = {"score": 0, "gameOver": False, "gameWon": False}


def thing(uuid: int, contains: list[str] | None = None, **properties: object) -> dict:
    return {
        "name": f"thing (ID: {uuid})",
        "uuid": uuid,
        "type": "Thing",
        "properties": properties,
        "contains": contains or [],
    }


ROOM = [
    thing(1, ["cup (ID: 2)", "tap (ID: 3)"], isOpen=True),
    thing(2, full=False, weight=1, wires={"a": [None, "x"]}),
    thing(3, isOn=False),
]
STEPS = {
    "unchanged": Transition(ROOM, SCORE, ROOM, SCORE),
    "changed": Transition(
        ROOM, SCORE, [ROOM[0], thing(2, full=True, weight=1, wires={"a": ["y", "x"]}), thing(3, isOn=True)], SCORE
    ),
    "score": Transition(ROOM, SCORE, ROOM, {"score": 1, "gameOver": True, "gameWon": True}),
    "created": Transition(
        ROOM,
        SCORE,
        [thing(1, ["cup (ID: 2)", "tap (ID: 3)", "ice (ID: 4)"], isOpen=True), *ROOM[1:], thing(4, cold=True)],
        SCORE,
    ),
    "removed": Transition(ROOM, SCORE, [thing(1, ["cup (ID: 2)"], isOpen=True), ROOM[1]], SCORE),
    "order": Transition(ROOM, SCORE, [thing(1, ["tap (ID: 3)", "cup (ID: 2)"], isOpen=True), *ROOM[1:]], SCORE),
}


def copied(step: Transition) -> dict:
    return json.loads(json.dumps(state_difference(step)))


def with_extra_key(step: Transition) -> dict:
    answer = copied(step)
    for item in answer["modified"]:
        item["properties"]["extra"] = 1
    return answer


def with_wrong_name(step: Transition) -> dict:
    answer = copied(step)
    for item in answer["modified"]:
        item["name"] = "another"
    return answer


def keep_removed(step: Transition) -> dict:
    return {**copied(step), "removed": []}


@pytest.mark.parametrize(
    ("name", "changed", "gold", "faithful", "strict", "empty"),
    [
        ("unchanged", False, False, True, True, True),
        ("changed", True, True, True, True, False),
        ("score", True, False, True, True, False),
        ("created", True, True, False, True, False),
        ("removed", True, True, True, True, False),
        ("order", False, False, True, True, True),
    ],
)
def test_oracle_and_empty_answers(
    name: str, changed: bool, gold: bool, faithful: bool, strict: bool, empty: bool
) -> None:
    step = STEPS[name]
    assert (step.changed, step.gold) == (changed, gold)
    for text in (json.dumps(state_difference(step)), repr(state_difference(step))):
        answer = f"I think True things.\nThe final answer is: {text}"
        assert (
            judge(answer, step, "binary", "faithful").right is faithful
            and judge(answer, step, "binary", "strict").right is strict
        )
    assert judge(EMPTY, step, "binary", "faithful").right is judge(EMPTY, step, "binary", "strict").right is empty


def test_task_specific_by_hand() -> None:
    step = STEPS["changed"]
    assert judge_difference(state_difference(step), step, "task_specific").reward == pytest.approx(1.3)
    # Items: isOpen, contains | full, weight, wires, contains | isOn, contains = 8, of which full, wires and isOn
    # change.
    assert judge(EMPTY, step, "task_specific").reward == pytest.approx(0.09 * 5 / 8 + 0.01)
    half = {"modified": [step.target[2]], "removed": [], "score": {}}
    assert judge_difference(half, step, "task_specific").reward == pytest.approx(0.09 * 6 / 8 + 0.01 + 1 / 3)
    assert judge(EMPTY, STEPS["unchanged"], "task_specific").reward == pytest.approx(0.3)
    created = STEPS["created"]  # 8 items right, the new object is one error
    assert judge_difference(state_difference(created), created, "task_specific").reward == pytest.approx(
        0.09 * 8 / 9 + 0.01 + 1
    )
    assert judge_difference(state_difference(created), created, "task_specific", "strict").reward == pytest.approx(1.3)


def test_blind_spots_are_faithful_and_closed_in_strict_mode() -> None:
    step, removed = STEPS["changed"], STEPS["removed"]
    assert (
        judge_difference(with_extra_key(step), step).right
        and not judge_difference(with_extra_key(step), step, mode="strict").right
    )
    assert judge_difference(with_extra_key(step), step, "task_specific").reward == 0.0
    assert (
        judge_difference(with_wrong_name(step), step).right
        and not judge_difference(with_wrong_name(step), step, mode="strict").right
    )
    assert (
        judge_difference(keep_removed(removed), removed).right
        and not judge_difference(keep_removed(removed), removed, mode="strict").right
    )
    ghost = {"modified": [*copied(step)["modified"], thing(99)], "removed": [], "score": {}}
    assert judge_difference(ghost, step).right and not judge_difference(ghost, step, mode="strict").right
    one = json.loads(json.dumps(state_difference(step)).replace('"full": true', '"full": 1'))
    assert judge_difference(one, step).right and not judge_difference(one, step, mode="strict").right
    bare = {"modified": [removed.target[0]], "removed": 3}
    assert judge_difference(bare, removed, mode="strict").right


def test_golden_counts_on_the_public_sample() -> None:
    root = os.environ.get("TERRELLA_SHARED_DATA")
    if not root:
        pytest.skip(
            "set TERRELLA_SHARED_DATA to the folder that holds bytesized32/ (its licence does not let us ship it)"
        )
    lines = (Path(root) / "bytesized32" / "test_sample.jsonl").read_text().splitlines()
    steps = [Transition.from_row(json.loads(line)) for line in lines]
    created = [s for s in steps if set(s.after) - set(s.before)]
    removed = [s for s in steps if set(s.before) - set(s.after)]
    gold = [s for s in steps if s.gold and not set(s.after) - set(s.before)]
    assert (len(steps), sum(s.changed for s in steps), len(created), len(removed), len(gold)) == (442, 268, 21, 25, 225)
    oracle = [json.dumps(state_difference(s)) for s in steps]
    assert sum(judge(o, s).right for o, s in zip(oracle, steps, strict=True)) == 421
    assert sum(judge(repr(state_difference(s)), s).right for s in steps) == 421
    assert sum(judge(o, s, "binary", "strict").right for o, s in zip(oracle, steps, strict=True)) == 442
    assert (
        sum(judge(EMPTY, s).right for s in steps)
        == sum(judge(EMPTY, s, "binary", "strict").right for s in steps)
        == 174
    )
    rewards = Counter(round(judge(o, s, "task_specific").reward, 1) for o, s in zip(oracle, steps, strict=True))
    assert rewards == {1.3: 225, 0.3: 196, 1.1: 21}
    low = [judge(json.dumps(state_difference(s)), s, "task_specific").reward for s in created]
    assert 1.09 < min(low) and max(low) < 1.1
    assert sum(judge_difference(keep_removed(s), s).right for s in removed) == 14
    assert sum(judge_difference(keep_removed(s), s, mode="strict").right for s in removed) == 0
    assert all(judge_difference(with_extra_key(s), s).right for s in gold)
    assert all(judge_difference(with_extra_key(s), s, "task_specific").reward == 0 for s in gold)
    assert all(judge_difference(with_wrong_name(s), s).right for s in gold)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The final answer is: A The final answer is: B", "B"),
        ("the final state is: X The final answer is: Y the final state is: Z", "Y the final state is: Z"),
        ("text ```json 0123456789 ``` more ```json abcdefghijk ``` end", "abcdefghijk"),
        ("```json 0123456789 ```json abcdefghijk ```", "0123456789"),
        ("text ```json short ```", "text ```json short ```"),
        ("nothing", "nothing"),
    ],
)
def test_extract_answer(text: str, expected: str) -> None:
    assert extract_answer(text) == expected


def test_faithful_rewards_are_those_of_the_release() -> None:
    """Answers of our own, in the ways models write them, and their rewards by the release's rules with json_repair
    0.64.2 and dirtyjson.
    """
    cases = json.loads((Path(__file__).parent / "release_answers.json").read_text(encoding="utf-8"))
    seen, right, wrong = Counter(), Counter(), []
    for where, name, answer, binary, specific in cases:
        for kind, wanted in (("binary", binary), ("task_specific", specific)):
            verdict = judge(answer, STEPS[name], kind)
            seen[where] += 1
            if verdict.reward != pytest.approx(wanted, abs=1e-9):
                wrong.append((where, name, kind, answer, verdict, wanted))
        right[where] += binary
    for where, count in seen.items():
        print(f"{where}: {count} judgements, {right[where]} of {count // 2} answers right in the release")
    print(f"{sum(seen.values())} judgements, {len(wrong)} unlike the release")
    assert not wrong, wrong[:3]


def test_strict_mode_says_what_it_rejects() -> None:
    step = STEPS["changed"]
    text = json.dumps(state_difference(step))
    for answer in (
        text + "\nBecause.",
        text[:-1],
        json.dumps({k: v for k, v in copied(step).items() if k != "score"}),
        repr(copied(step)),
    ):
        assert judge(answer, step, mode="strict").right
    # a template that opens <think> itself leaves the end of it to the model
    thought = 'The lid {"open": true} matters.\n</think>\n\n'
    for answer in (
        rf"\boxed{{{text}}}",
        rf"The final answer is: $\boxed{{ {text} }}$",
        thought + text,
        thought + rf"\boxed{{{text}}}",
    ):
        assert judge(answer, step, mode="strict").right, answer
    rejected = {
        "// why\n" + text.replace("{", "{ // why\n", 1): "a key cannot be '/'",
        text.replace('"removed": []', '"removed": (3, 4)'): r"unexpected '\('",
        "The set {a, b} changes: " + text: "no colon after the key 'a'",
        json.dumps({"modified": []}): "no key removed",
        json.dumps({"modified": [{"name": "cup"}], "removed": []}): "objects with a uuid",
        "": "no brace",
    }
    for answer, reason in rejected.items():
        verdict = judge(answer, step, mode="strict")
        assert not verdict.right and re.search(reason, verdict.reason), (answer, verdict.reason)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("noise {'a': True, 'b': None,} tail", {"a": True, "b": None}),
        ('{"a": [1, 2.5, -3e2, "x\\n\\u0041"', {"a": [1, 2.5, -300.0, "x\nA"]}),
        ("{a: 1 b: {'c': \"it's\"}}", {"a": 1, "b": {"c": "it's"}}),
        ('{"a": 1} {"b": 2}', {"a": 1}),
    ],
)
def test_loose_json(text: str, value: dict) -> None:
    assert read_mapping(text) == value


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(value=st.dictionaries(st.text(max_size=6), JSON_VALUES, max_size=4), tail=st.text("abc}] ,", max_size=6))
def test_loose_json_reads_whatever_json_and_python_write(value: dict, tail: str) -> None:
    assert read_mapping("see: " + json.dumps(value) + tail) == value
    assert read_mapping("see: " + repr(value) + tail) == value


HOSTILE = {
    "braces": "{" * 100_000,
    "lists": '{"modified":' + "[" * 100_000,
    "mappings": '{"a":' * 20_000,
    "backslashes": "{'" + "\\" * 100_001,
    "fences": "```json" * 15_000,
    "markers": "The final answer is:" * 5_000 + "{",
    "surrogates": '\ud800{"modified": [], "removed": \udfff}',
    "bytes": b'{"modified": [\xff\xfe], "removed": []}'.decode("utf-8", "replace"),
    "digits": '{"modified": [], "removed": ' + "9" * 100_000 + "}",
    "quotes": "{" + '"' * 99_999,
    "uuid": '{"modified": [{"uuid": [1]}], "removed": []}',
    "no properties": '{"modified": [{"uuid": 2}], "removed": {}}',
    "contents": '{"modified": [{"uuid": 2, "properties": {}, "contains": [{"a": 1}, 2]}], "removed": [[1]]}',
    "infinite": '{"modified": [], "removed": [1], "score": {"score": 1e9999, "gameOver": NaN}}',
    "long": "x" * 3_000_000,
    "list": "[1, 2]",
    "empty": "",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_are_zero_in_bounded_time(name: str) -> None:
    start = time.process_time()
    for kind in ("binary", "task_specific"):
        for mode in ("faithful", "strict"):
            verdict = judge(HOSTILE[name], STEPS["changed"], kind, mode)
            assert not verdict.right and verdict.reward < 0.1 and (verdict.reason or verdict.items < 1)
    assert time.process_time() - start < 2


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(
            [*"{}[]\"':,\\ \n1e.-", "True", "None", '"modified":', '"removed":', '"uuid": 2', '"properties": {']
        )
    )
)
def test_anything_is_judged(parts: list[str]) -> None:
    text = "".join(parts)
    assert judge('{"modified": [{"uuid": 2, ' + text, STEPS["changed"], "task_specific", "strict").reward >= 0
    try:
        read_mapping(text)
    except Unreadable:
        pass


def test_speed() -> None:
    step = STEPS["changed"]
    # Python's way of writing is not JSON: the faithful judge must have it repaired, by a parser in Python
    for write, mode, least in ((json.dumps, "faithful", 2000), (repr, "strict", 2000), (repr, "faithful", 300)):
        answer = "Because. " * 100 + f"The final answer is: {write(state_difference(step))}"
        rates = []
        for _ in range(3):
            start = time.process_time()
            for _ in range(100):
                judge(answer, step, "task_specific", mode)
            rates.append(100 / (time.process_time() - start))
        print(f"{write.__name__}, {mode}: {max(rates):,.0f} answers a second")
        assert max(rates) > least
