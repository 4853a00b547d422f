"""Question answering with retries: each wrong try halves the reward. Questions come from a file or from our own
generator.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...core.errors import ConfigError
from .base import (
    Action,
    Snapshot,
    StepResult,
    World,
    WorldFault,
    check_file,
    check_mode,
    check_started,
    read_rows,
)

MARK = "The answer is:"
_NAMES = ("Ada", "Bo", "Chen", "Dina", "Emil", "Fatou", "Gita", "Hugo", "Ines", "Jun")
_THINGS = ("apples", "books", "coins", "marbles", "pens", "shells", "stamps", "tickets")


@dataclass(frozen=True)
class QAConfig:
    """`file`: JSON lines with `query` and `response`, the response ending in "The answer is: ..."; without it,
    generated arithmetic.
    """

    file: str | None = None

    def __post_init__(self) -> None:
        check_file(self.file)


def gold_answer(response: str) -> str:
    """What follows the last "The answer is:"; raises ValueError when there is nothing."""
    _, mark, answer = response.rpartition(MARK)
    if not mark or not answer.strip():
        raise ValueError(f"no {MARK!r} in {response[-80:]!r}")
    return answer.strip()


def same_answer(answer: str, gold: str) -> bool:
    """Equality without case and without any whitespace."""
    return "".join(answer.lower().split()) == "".join(gold.lower().split())


def make_question(seed: int) -> tuple[str, str]:
    """(query, gold answer) of a seed: a small word problem in whole numbers."""
    rng = random.Random(seed)
    name, other = rng.sample(_NAMES, 2)
    thing = rng.choice(_THINGS)
    a, b, c = rng.randint(2, 20), rng.randint(2, 12), rng.randint(2, 9)
    kind = rng.randrange(4)
    if kind == 0:
        query, answer = (
            (
                f"{name} has {a} {thing}, finds {b} more and then doubles the lot by a trade. How many {thing} are "
                "there now?"
            ),
            2 * (a + b),
        )
    elif kind == 1:
        query = f"{name} fills {b} boxes with {c} {thing} each and keeps {a} in hand. How many {thing} does {name} own?"
        answer = b * c + a
    elif kind == 2:
        query = (
            f"{name} shares {c * b} {thing} among {b} children. {other} then takes 1 from each. How many has each "
            "child?"
        )
        answer = c - 1
    else:
        query = (
            f"A ticket costs {c} coins. {name} starts with {c * b + a} coins and buys {b} tickets. How many coins "
            "are left?"
        )
        answer = a
    return query, str(answer)


@lru_cache(maxsize=4)
def questions_of(file: str) -> list[tuple[str, str]]:
    """(query, gold answer) of the file's rows; read once, as every episode has a world of its own."""
    rows = read_rows(file, lambda row: (row["query"], gold_answer(row["response"])))
    if not rows:
        raise ConfigError(f"{file}: holds no questions")
    return rows


class QA(World):
    """Answer until right; the k-th wrong try halves what a right answer still gives."""

    name = "qa"
    Config = QAConfig

    def __init__(self, **settings: Any) -> None:
        self.config = QAConfig(**settings)
        self.rows = questions_of(self.config.file) if self.config.file else None
        self.query: str | None = None

    def reset(self, seed: int, sample: int = 0) -> str:
        self.query, self.gold = random.Random(seed).choice(self.rows) if self.rows else make_question(seed)
        self.tries, self.feedback = 0, ""
        return self.render()

    def step(self, action: Action) -> StepResult:
        check_started(self, self.query)
        right = same_answer(str(action), self.gold)
        reward = 0.5**self.tries if right else 0.0
        self.tries += 1
        self.feedback = "Correct." if right else "Incorrect. Think again."
        info = {"action_is_effective": right, "action_is_valid": True, "success": right}
        return StepResult(self.feedback, reward, right, info)

    def render(self, mode: str = "text") -> str:
        check_mode(self, mode)
        check_started(self, self.query)
        return self.feedback or str(self.query)

    def right_answer(self) -> str | None:
        return getattr(self, "gold", None)

    def random_action(self, rng: random.Random) -> str:
        return str(rng.randint(0, 99))

    def snapshot(self) -> Snapshot:
        check_started(self, self.query)
        return {
            "world": self.name,
            "query": self.query,
            "gold": self.gold,
            "tries": self.tries,
            "feedback": self.feedback,
        }

    def restore(self, snapshot: Snapshot) -> None:
        if snapshot.get("world") != self.name:
            raise WorldFault(f"qa: a snapshot of {snapshot.get('world')!r}")
        self.query, self.gold, self.tries, self.feedback = (snapshot[k] for k in ("query", "gold", "tries", "feedback"))
