"""Countdown: write an expression that uses every given number once and reaches the target. Nothing is handed to
`eval`.
"""

from __future__ import annotations

import ast
import itertools
import operator
import random
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
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

MAX_LENGTH = 200
WRONG_VALUE_REWARD = 0.1
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


@dataclass(frozen=True)
class CountdownConfig:
    """`file`: JSON lines with `nums` and `target` (rows that sums and differences cannot reach are dropped); without
    it, own instances.
    """

    file: str | None = None
    largest: int = 99
    additive: bool = True  # own instances: sums and differences only, as in the public filter

    def __post_init__(self) -> None:
        check_file(self.file)
        if self.largest < 1:
            raise ValueError(f"largest: {self.largest} must be at least 1")


def evaluate(expression: str) -> tuple[Fraction, Counter[int]]:
    """Value and the numbers used of an expression of + - * / and parentheses; raises ValueError on anything else."""
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"longer than {MAX_LENGTH} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
        numbers: Counter[int] = Counter()
        return _value(tree, numbers), numbers
    except (SyntaxError, RecursionError, MemoryError, ZeroDivisionError) as error:
        raise ValueError(f"{type(error).__name__} in {expression!r}") from None


def _value(node: ast.AST, numbers: Counter[int]) -> Fraction:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            numbers[number] += 1
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, numbers)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, numbers)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SIGNS:
            return _OPERATIONS[_SIGNS[type(op)]](_value(left, numbers), _value(right, numbers))
    raise ValueError(f"{type(node).__name__} is not allowed in an expression")


def score(expression: str, nums: list[int], target: int) -> tuple[float, str]:
    """(reward, reason): 1 for the target, 0.1 for the right numbers with another value, 0 otherwise."""
    try:
        value, used = evaluate(expression)
    except ValueError as error:
        return 0.0, f"malformed: {error}"
    if used != Counter(nums):
        return 0.0, "other numbers"
    return (1.0, "solved") if abs(value - target) < Fraction(1, 100_000) else (WRONG_VALUE_REWARD, "other value")


def additive_solution(nums: list[int], target: int) -> str | None:
    """An expression of signs alone that reaches the target, or None."""
    for signs in itertools.product((1, -1), repeat=len(nums)):
        if sum(s * n for s, n in zip(signs, nums, strict=True)) == target:
            terms = sorted(zip(signs, nums, strict=True), reverse=True)
            return "".join(f"{'+' if s > 0 else '-'}{n}" for s, n in terms).removeprefix("+")
    return None


def make_instance(config: CountdownConfig, seed: int) -> tuple[list[int], int]:
    """Numbers and target of a seed, solvable by construction, with 3 or 4 numbers."""
    rng = random.Random(seed)
    while True:
        nums = [rng.randint(1, config.largest) for _ in range(rng.choice((3, 4)))]
        value = Fraction(nums[0])
        for number in nums[1:]:
            value = _OPERATIONS[rng.choice("+-" if config.additive else "+-*/")](value, number)
        if value.denominator == 1 and 0 < value <= 1000:
            rng.shuffle(nums)
            return nums, int(value)


@lru_cache(maxsize=4)
def solvable_rows(file: str) -> list[tuple[list[int], int]]:
    """Numbers and target of the file's rows that sums and differences solve; read once, as every episode has a world
    of its own.
    """
    rows = read_rows(file, lambda row: (list(map(int, row["nums"])), int(row["target"])))
    solvable = [row for row in rows if additive_solution(*row)]
    if not solvable:
        raise ConfigError(f"{file}: has no row that sums and differences solve")
    return solvable


class Countdown(World):
    """One expression, then the episode is over."""

    name = "countdown"
    Config = CountdownConfig

    def __init__(self, **settings: Any) -> None:
        self.config = CountdownConfig(**settings)
        self.rows = solvable_rows(self.config.file) if self.config.file else None
        self.nums: list[int] | None = None

    def reset(self, seed: int, sample: int = 0) -> str:
        self.nums, self.target = self.rows[seed % len(self.rows)] if self.rows else make_instance(self.config, seed)
        self.done = False
        return self.render()

    def step(self, action: Action) -> StepResult:
        check_started(self, self.nums)
        assert self.nums is not None
        if self.done:
            raise WorldFault("countdown: the episode is over; call reset(seed)")
        reward, reason = score(str(action), self.nums, self.target)
        self.done = True
        info = {
            "action_is_effective": reward > 0,
            "action_is_valid": not reason.startswith("malformed"),
            "success": reward == 1.0,
        }
        return StepResult(f"{self.render()}\nResult: {reason}.", reward, True, info)

    def right_answer(self) -> str | None:
        return additive_solution(self.nums, self.target) if self.nums else None

    def render(self, mode: str = "text") -> str:
        check_mode(self, mode)
        check_started(self, self.nums)
        return f"Target: {self.target}, nums: [{', '.join(map(str, self.nums or ()))}]"

    def random_action(self, rng: random.Random) -> str:
        nums = rng.sample(self.nums or [], len(self.nums or []))
        return "".join(f"{rng.choice('+-') if i else ''}{n}" for i, n in enumerate(nums))

    def snapshot(self) -> Snapshot:
        check_started(self, self.nums)
        return {"world": self.name, "nums": list(self.nums or ()), "target": self.target, "done": self.done}

    def restore(self, snapshot: Snapshot) -> None:
        if snapshot.get("world") != self.name:
            raise WorldFault(f"countdown: a snapshot of {snapshot.get('world')!r}")
        self.nums, self.target, self.done = list(snapshot["nums"]), int(snapshot["target"]), bool(snapshot["done"])
