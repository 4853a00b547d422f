"""Scores with their sample size and 95 % interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959963984540054


@dataclass(frozen=True)
class Estimate:
    """A mean, its 95 % interval and its sample size. With n = 0 all values are NaN."""

    value: float
    low: float
    high: float
    n: int

    @property
    def all_equal(self) -> bool:
        """Whether the values did not differ, so that the interval has no width and says nothing of others."""
        return self.n > 1 and not has_width(self.value, self.low, self.high)

    def to_cell(self) -> dict[str, float | int | None]:
        """As a table cell, in strict JSON: null instead of NaN, such as the interval of a single task."""
        numbers = {"value": self.value, "low": self.low, "high": self.high}
        return {name: x if math.isfinite(x) else None for name, x in numbers.items()} | {"n": self.n}


def has_width(value: float, low: float, high: float) -> bool:
    """Whether an interval is wider than rounding makes it."""
    return high - low > 1e-12 * max(1.0, abs(value))


def proportion(successes: int, n: int) -> Estimate:
    """A success rate with Wilson's interval, which stays inside [0, 1]."""
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    p = successes / n
    centre = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n * n)) / (1 + Z95**2 / n)
    return Estimate(p, max(0.0, centre - half), min(1.0, centre + half), n)


def mean_of_proportions(parts: Sequence[Estimate]) -> Estimate:
    """The mean of independent success rates. The distances to their limits are combined like standard errors, so that
    the interval stays in [0, 1].
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
    """A mean with the normal interval. That has no width if all values are equal, so shares that are all 0 or all 1 get
    Wilson's interval.
    """
    same = len(values) > 1 and set(values) in ({0.0}, {1.0})
    return proportion(round(sum(values)), len(values)) if same else mean(values)


def mean_share(values: Sequence[float]) -> Estimate:
    """A mean of values between 0 and 1, its interval cut to that range."""
    estimate = mean_or_share(values)
    return Estimate(estimate.value, max(0.0, estimate.low), min(1.0, estimate.high), estimate.n) if values else estimate


def mean_change(changes: Sequence[float]) -> Estimate:
    """The mean of paired changes of shares with the normal interval. That has no width if all are equal, so changes
    that are all -1, 0 or 1 get Bonett and Price's interval.
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
