"""Actions as tokens: every number of an action is put into one of equal bins between a lowest and a highest value."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

EPS = 1e-8
# lowest and highest of RT-1's 13 numbers over the whole data set, as released
RT1_RANGES = (
    (-0.39601, 0.39600), (-0.00963, 0.00368), (-0.40005, 0.39991), (-1.0, 1.0), (-1.56992, 1.57064), (-1.56989, 1.53211),
    (-1.57042, 1.56915), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0), (-2.02045, 2.99846), (-5.49790, 22.09053), (-2.03166, 2.75075),
)  # fmt: skip


@dataclass(frozen=True)
class ActionBins:
    """The range of each number and how many bins it has."""

    ranges: tuple[tuple[float, float], ...]
    bins: int = 256

    def __post_init__(self) -> None:
        for i, (low, high) in enumerate(self.ranges):
            if not low < high:
                raise ValueError(f"ranges: number {i} goes from {low} to {high}")

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """Bins of [..., A] actions; values outside the range go to its ends."""
        low, high = np.array(self.ranges, np.float64).T
        if actions.shape[-1] != len(low):
            raise ValueError(f"actions have {actions.shape[-1]} numbers, the ranges {len(low)}")
        if not np.isfinite(actions).all():
            raise ValueError("an action is not finite")
        share = np.clip((actions - low) / (high - low + EPS), 0.0, 1.0)
        return np.minimum((share * self.bins).astype(np.int64), self.bins - 1)

    def decode(self, bins: np.ndarray) -> np.ndarray:
        """The middle of each bin."""
        low, high = np.array(self.ranges, np.float64).T
        return low + (bins + 0.5) / self.bins * (high - low)


def quantile_ranges(actions_NA: np.ndarray, share: float = 0.001) -> tuple[tuple[float, float], ...]:
    """Ranges that leave out the extreme `share` at both ends: one outlier then does not cost the others their resolution."""
    low, high = np.quantile(actions_NA, share, axis=0), np.quantile(actions_NA, 1 - share, axis=0)
    return tuple((float(a), float(b) if b > a else float(a) + 1.0) for a, b in zip(low, high, strict=True))
