"""The numbers that finite scalar quantisation needs of each dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence

SLACK = 1e-3  # widens the squash a little, so that the outermost levels can be reached


def fsq_constants(levels: Sequence[int]) -> tuple[list[float], list[float], list[float], list[int], list[int]]:
    """(half range, offset, shift, half levels, basis) of each dimension."""
    half = [(n - 1) * (1 + SLACK) / 2 for n in levels]
    offset = [0.5 if n % 2 == 0 else 0.0 for n in levels]
    shift = [math.atanh(o / h) for o, h in zip(offset, half, strict=True)]
    basis = [math.prod(levels[:i]) for i in range(len(levels))]
    return half, offset, shift, [n // 2 for n in levels], basis
