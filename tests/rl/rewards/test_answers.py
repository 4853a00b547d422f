"""The rewards exact, contains and number: what they score, and the true answers that are a fault and no zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from terrella.data.trajectory import Invalid
from terrella.rl.hosted import Host
from terrella.rl.rewards.answers import REWARDS, contains, exact, number


@pytest.mark.parametrize(
    ("reward", "answer", "truth", "score"),
    [
        (exact, " 4\n", 4, 1.0),
        (exact, "4", "4 ", 1.0),
        (exact, "four", 4, 0.0),
        (exact, " ", "", 1.0),  # to say nothing can be right
        (exact, "4", "", 0.0),
        (contains, "it is 4.", " 4", 1.0),
        (contains, "it is 5.", 4, 0.0),
        (number, "3 and 1,004.50", "so 1004.5", 1.0),
        (number, "none", 0, 0.0),
        (number, "0.00001", 1e-05, 1.0),  # a number of the file is compared as Python writes it
        (number, "10000000000000000", 1e16, 1.0),
        (number, "it ends with 16", 1e16, 0.0),
        (number, "2E3 apples", "2,000", 1.0),
    ],
)
def test_scores(reward: Any, answer: str, truth: Any, score: float) -> None:
    assert reward("p", answer, {"answer": truth}) == score


@pytest.mark.parametrize("name", REWARDS)
def test_a_true_answer_that_cannot_be_compared_is_a_fault(name: str) -> None:
    truths: list[Any] = [["4", "four"], {"value": 4}, True, None]
    said = ["['4', 'four'] (list)", "{'value': 4} (dict)", "True (bool)", "no true answer"]
    empty = {"contains": "empty", "number": "'' holds no number"}.get(name)
    if empty is not None:
        truths += ["", " "]
        said += [empty] * 2
    with Host(REWARDS[name], Path(), 20.0) as host:
        scores = host.score(["p"] * len(truths), ["4"] * len(truths), [{"answer": truth} for truth in truths])
        assert host.score(["p"], ["4"], [{"answer": "4"}])[0].reward == 1.0
    for score, words in zip(scores, said, strict=True):
        assert isinstance(score.reward, Invalid), (words, score)
        assert words in score.reward.reason and "env.answer" in score.reward.reason, score.reward.reason
        assert "true answer" in score.reward.reason
