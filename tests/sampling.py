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
    return [
        cases[i] for i in sorted(random.Random(f"{_commit()} {len(cases)} {count}").sample(range(len(cases)), count))
    ]


def sampled(cases: Sequence[Any], count: int) -> list[Any]:
    """All cases as parameters of a test, of which only a few are not marked `full`."""
    now = few(range(len(cases)), count)
    return [
        case if i in now else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full)
        for i, case in enumerate(cases)
    ]


def every_value(items: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Of each test's rows so many that every value of every parameter is in one, combined as the commit draws it."""
    drawn = random.Random(_commit()).sample(range(len(items)), len(items))
    seen: set[tuple[str, ...]] = set()
    kept = set()
    for number in drawn:
        item = items[number]
        values = {(item.originalname,)}
        for mark in item.iter_markers("parametrize"):
            names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
            values.add((item.originalname, *(f"{n.strip()}={item.callspec.params[n.strip()]!r}" for n in names)))
        if not values <= seen:
            kept.add(number)
            seen |= values
    return [item for number, item in enumerate(items) if number in kept]


# Long tests, each beside cheaper ones of the same thing, and how many of them CI runs; first those of half a minute or
# more.
LONG = (
    (
        2,
        (
            "adapters",
            "shared heads",
            "shared sampler",
            "fp8",
            "advantages",
            "imagined",
            "exploited",
            "key heads",
            "balanced experts",
            "notebook",
        ),
    ),
    (1, ("kernels compiled", "decoding interpreted", "experts")),
    (
        5,  # of a quarter of a minute each
        (
            "one step off",
            "lock step",
            "teaching play",
            "foreign sampler",
            "imitated play",
            "failed validation",
            "tokenizer by path",
            "sft from python",
            "streamed conversion",
            "interrupted conversion",
            "fused layers",
            "planner's weights",
            "release's commands",
            "names in pieces",
            "strangers at the door",
        ),
    ),
    (
        4,  # of a minute or more each, with the real components
        (
            "colocated engine killed",
            "server killed",
            "engine as a child",
            "ray",
            "two nodes requeued",
            "lost node",
            "more steps",
            "exchange",
        ),
    ),
)


def in_turn(case: str) -> Callable[[Any], Any]:
    """Decorates a long test: CI runs it where the commit draws it."""
    count, cases = next((count, cases) for count, cases in LONG if case in cases)
    return (lambda test: test) if case in few(cases, count) else pytest.mark.full
