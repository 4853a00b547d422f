"""Rewards for answers to questions of one's own: the whole text, a text it holds, or its last number. Importable
without torch.
"""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

Rule = Literal["exact", "contains", "number"]  # functions below, by their names in a recipe
REWARDS = {name: f"terrella.rl.rewards.answers:{name}" for name in get_args(Rule)}
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def _truth(info: dict[str, Any]) -> str:
    if info.get("answer") is None:
        raise ValueError(
            "the row has no true answer to compare with; name its column with env.answer, or use a reward of your own"
        )
    return str(info["answer"])


def exact(prompt: str, answer: str, info: dict[str, Any]) -> float:
    """1 where the answer is the true one, but for space around it."""
    return float(answer.strip() == _truth(info).strip())


def contains(prompt: str, answer: str, info: dict[str, Any]) -> float:
    """1 where the true answer occurs in the answer."""
    return float(_truth(info).strip() in answer)


def last_number(text: str) -> float | None:
    """The last number of a text; commas between digits are left out."""
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def number(prompt: str, answer: str, info: dict[str, Any]) -> float:
    """1 where the last number of the answer equals the last one of the true answer, as for arithmetic word problems."""
    truth = last_number(_truth(info))
    if truth is None:
        raise ValueError(f"the true answer {_truth(info)[:80]!r} holds no number")
    return float(last_number(answer) == truth)
