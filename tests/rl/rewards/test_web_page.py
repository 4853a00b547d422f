"""The web-page reward: golden vectors of the public judge, its holes and how strict mode closes them, hostile
answers, speed.
"""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrella.rl.rewards.web_page import HEADERS, NOTHING, judge, read_sections

MODES = ("faithful", "strict")


def answer(new: list[str], deleted: list[str], updated: list[str]) -> str:
    return "\n\n".join(
        "\n".join((header, *(items or ["None"])))
        for header, items in zip(HEADERS, (new, deleted, updated), strict=True)
    )


FOUR = answer(["[1] link 'a'", "[2] link 'b'"], ["[3] button 'c'"], ["[4] textbox 'd' focused: True"])
GOLD = answer(["[1] link 'a'", "[2] link 'b'"], [], ["[3] link 'c'"])


@pytest.mark.parametrize(
    ("response", "truth", "faithful"),
    [
        (NOTHING, NOTHING, 1.0),
        (NOTHING + "\nThat is all.", NOTHING, 6 / 7),
        (FOUR, FOUR, 1.0),
        ("I think so.\nNew items:\nmany of them\n\n" + FOUR, FOUR, 8 / 9),
        (answer(["[1] link 'a'"], [], []), GOLD, 4 / 7),
        ("", GOLD, 0.0),
    ],
)
def test_golden_vectors(response: str, truth: str, faithful: float) -> None:
    assert judge(response, truth).reward == pytest.approx(faithful)


@pytest.mark.parametrize(
    ("response", "truth", "strict"),
    [
        (NOTHING, NOTHING, 1.0),
        ("New items: perhaps\n<think>New items:\nx</think>\nSo:\n" + FOUR, FOUR, 1.0),
        ("New items:\nmany of them\n\n" + FOUR, FOUR, 1.0),  # the last answer counts
        (FOUR + "\nThat is all.", FOUR, 8 / 9),
        (FOUR.replace("[1] link 'a'", "[1] link 'a'\n[1] link 'a'"), FOUR, 8 / 9),  # saying it twice does not help
        (answer(["[1] link 'a'"], [], []), GOLD, 2 * 1 * (1 / 3) / (4 / 3)),
        (NOTHING, GOLD, 0.0),
        (FOUR, NOTHING, 0.0),
        (FOUR + "\n" + FOUR.split("\n\n")[1], FOUR, 0.0),  # a section twice
        (FOUR.replace("Deleted", "Updated", 1), FOUR, 0.0),
    ],
)
def test_strict_mode(response: str, truth: str, strict: float) -> None:
    assert judge(response, truth, "strict").reward == pytest.approx(strict)


def test_the_trivial_answer_is_paid_by_the_faithful_mode_only() -> None:
    one = answer(["[1] link 'a'"], [], [])
    assert judge(NOTHING, one).reward == pytest.approx(2 / 3)
    assert judge(NOTHING, one, "strict").reward == 0.0


def test_precision_and_recall() -> None:
    verdict = judge(answer(["[1] link 'a'"], [], []), GOLD)
    assert (verdict.precision, verdict.recall) == (2 / 3, 0.5)


HOSTILE = {
    "braces": "{" * 100_000,
    "nesting": "New items:\n" + "[" * 100_000,
    "bytes": b"New items:\n\xff\xfe\n\nDeleted items:\n\xff".decode("utf-8", "replace"),
    "surrogates": "\ud800New items:\n\udfff",
    "headers": "New items:\n" * 9_000,
    "header in reasoning": "<think>\n" + FOUR.replace("'", "") + "\n</think>\nI am done.",
    "newlines": "\n" * 100_000,
    "spaces": " " * 100_000,
    "many lines": "New items:\n" + "\n".join(map(str, range(20_000))),
    "long": "x" * 3_000_000,
    "empty": "",
    "carriage": "New items:\r\n[1]\r\r",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("mode", MODES)
def test_hostile_answers_are_bounded(name: str, mode: str) -> None:
    begun = time.process_time()
    verdict = judge(HOSTILE[name], FOUR, mode)
    assert verdict.reward == 0.0 and time.process_time() - begun < 0.5
    if mode == "strict" or name in ("braces", "newlines", "spaces", "long", "empty", "headers"):
        assert verdict.reason


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from([*HEADERS, "None", "[1] link 'a'", "[2] link 'b'", "", " ", "</think>", "x"]), max_size=14
    ).map("\n".join)
)
def test_any_answer_is_judged(text: str) -> None:
    for mode in MODES:
        verdict = judge(text, GOLD, mode)
        assert 0 <= verdict.reward <= 1 and (verdict.reward == 0 or not verdict.reason)
        assert judge(text, GOLD, mode) == verdict


def test_a_true_list_that_is_none_is_our_fault() -> None:
    with pytest.raises(ValueError, match="true change list"):
        judge(FOUR, "nonsense", "strict")


@pytest.mark.parametrize("mode", MODES)
def test_speed(mode: str) -> None:
    truth = read_sections(FOUR, mode)
    response = "Because the button was pressed, the page changes.\n" * 5 + FOUR
    rates = []
    for _ in range(3):
        begun = time.process_time()
        for _ in range(1000):
            judge(response, truth, mode)
        rates.append(1000 / (time.process_time() - begun))
    assert max(rates) > 5000
