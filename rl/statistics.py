"""Scores with their sample size and 95 % interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959963984540054


@dataclass(frozen=True)
class Estimate:
    """A mean, its 95 % interval and how many samples it rests on. With n = 0 all numbers are NaN."""

    value: float
    low: float
    high: float
    n: int

    def to_cell(self) -> dict[str, float | int | None]:
        """As tables have it, in JSON that every reader takes: null where there is no number, as of one task's width."""
        numbers = {"value": self.value, "low": self.low, "high": self.high}
        return {name: x if math.isfinite(x) else None for name, x in numbers.items()} | {"n": self.n}


def proportion(successes: int, n: int) -> Estimate:
    """A success rate with Wilson's interval, which stays inside [0, 1]."""
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    p = successes / n
    centre = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n * n)) / (1 + Z95**2 / n)
    return Estimate(p, max(0.0, centre - half), min(1.0, centre + half), n)


def mean_of_proportions(parts: Sequence[Estimate]) -> Estimate:
    """The mean of independent success rates; their distances to the limits are added as variances are, so the
    interval stays in [0, 1].
    """
    value = sum(p.value for p in parts) / len(parts)
    below, above = (
        math.sqrt(sum(d * d for d in ds)) / len(parts)
        for ds in zip(*((p.value - p.low, p.high - p.value) for p in parts), strict=True)
    )
    return Estimate(value, value - below, value + above, sum(p.n for p in parts))


def mean(values: Sequence[float]) -> Estimate:
    """A mean with the normal interval."""
    n = len(values)
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    m = sum(values) / n
    half = Z95 * math.sqrt(sum((v - m) ** 2 for v in values) / (n - 1) / n) if n > 1 else math.inf
    return Estimate(m, m - half, m + half, n)


def mean_or_share(values: Sequence[float]) -> Estimate:
    """A mean with the normal interval, which has no width where all values are equal: of shares that are all 0 or all 1
    Wilson's instead.
    """
    same = len(values) > 1 and set(values) in ({0.0}, {1.0})
    return proportion(round(sum(values)), len(values)) if same else mean(values)


def mean_share(values: Sequence[float]) -> Estimate:
    """A mean of values between 0 and 1, its interval cut to that range."""
    estimate = mean_or_share(values)
    return Estimate(estimate.value, max(0.0, estimate.low), min(1.0, estimate.high), estimate.n) if values else estimate


def mean_change(changes: Sequence[float]) -> Estimate:
    """The mean of paired changes of shares with the normal interval, which has no width where all are equal: of changes
    that are all -1, 0 or 1 Bonett and Price's instead.
    """
    same = len(changes) > 1 and set(changes) in ({-1.0}, {0.0}, {1.0})
    return _bonett_price(changes.count(1.0), changes.count(-1.0), len(changes)) if same else mean(changes)


def paired_difference(after: Sequence[bool], before: Sequence[bool]) -> Estimate:
    """The change of a success rate over the same tasks, with Bonett and Price's interval, which stays honest when no
    pair differs.
    """
    if not after:
        return Estimate(math.nan, math.nan, math.nan, 0)
    won = sum(a and not b for a, b in zip(after, before, strict=True))
    lost = sum(b and not a for a, b in zip(after, before, strict=True))
    return _bonett_price(won, lost, len(after))


def _bonett_price(won: int, lost: int, n: int) -> Estimate:
    up, down = (won + 1) / (n + 2), (lost + 1) / (n + 2)
    half = Z95 * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    return Estimate((won - lost) / n, max(-1.0, up - down - half), min(1.0, up - down + half), n)
