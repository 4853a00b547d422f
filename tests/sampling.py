"""Long lists of cases: CI runs a few of them, others with every commit; `make test-full` runs all."""

import random
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest


@cache
def _commit() -> str:
    """The commit under test; always the same word where there is no repository."""
    asked = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=60
    )
    return asked.stdout.strip()


def few(cases: Sequence[Any], count: int) -> list[Any]:
    """So many of the cases, in their order, drawn by the commit."""
    return [cases[i] for i in sorted(random.Random(_commit()).sample(range(len(cases)), count))]


def sampled(cases: Sequence[Any], count: int) -> list[Any]:
    """All cases as parameters of a test, of which only a few are not marked `full`."""
    now = few(range(len(cases)), count)
    return [case if i in now else pytest.param(case, marks=pytest.mark.full) for i, case in enumerate(cases)]


def in_turn(case: str, cases: Sequence[str]) -> Callable[[Any], Any]:
    """Decorates a test that takes turns with others: CI runs one of them."""
    return (lambda test: test) if case in few(cases, 1) else pytest.mark.full
