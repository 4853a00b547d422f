"""Rewards for answers to questions of one's own: the whole text, a text it holds, or its last number. Importable
without torch.
"""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

Rule = Literal["exact", "contains", "number"]  # functions below, by their names in a recipe
REWARDS = {name: f"terrella.rl.rewards.answers:{name}" for name in get_args(Rule)}
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?")
_REMEDY = "name another column with env.answer, or use a reward of your own"


def _truth(info: dict[str, Any]) -> str:
    """The true answer as text; ValueError where no text that a model writes can be compared with it."""
    truth = info.get("answer")
    if truth is None:
        raise ValueError(
            "the row has no true answer to compare with; name its column with env.answer, or use a reward of your own"
        )
    if isinstance(truth, bool | list | tuple | dict | bytes):
        raise ValueError(
            f"the true answer {str(truth)[:80]} ({type(truth).__name__}) is neither text nor number; {_REMEDY}"
        )
    return str(truth).strip()


def exact(prompt: str, answer: str, info: dict[str, Any]) -> float:
    """1 where the answer is the true one, but for space around it."""
    return float(answer.strip() == _truth(info))


def contains(prompt: str, answer: str, info: dict[str, Any]) -> float:
    """1 where the true answer occurs in the answer."""
    truth = _truth(info)
    if not truth:
        raise ValueError(f"the true answer is empty, and every text contains it; {_REMEDY}")
    return float(truth in answer)


def last_number(text: str) -> float | None:
    """The last number of a text; commas between digits are left out."""
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def number(prompt: str, answer: str, info: dict[str, Any]) -> float:
    """1 where the last number of the answer equals the last one of the true answer, as for arithmetic word problems."""
    text = _truth(info)
    truth = last_number(text)
    if truth is None:
        raise ValueError(f"the true answer {text[:80]!r} holds no number; {_REMEDY}")
    return float(last_number(answer) == truth)
