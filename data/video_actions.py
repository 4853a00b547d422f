"""Actions as tokens: every number of an action is put into one of equal bins between a lowest and a highest value."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

EPS = 1e-8
# lowest and highest of RT-1's 13 numbers over the whole data set, to the digit of the released fp32 file
RT1_RANGES = (
    (-0.39600885, 0.39600182), (-0.009631033, 0.0036767344), (-0.40004528, 0.39991137), (-1.0, 1.0), (-1.5699179,
    1.5706365),
    (-1.5698922, 1.5321087), (-1.5704194, 1.5691522), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0), (-2.020452, 2.9984593),
    (-5.4978995, 22.090528), (-2.0316634, 2.7507524),
)  # fmt: skip


@dataclass(frozen=True)
class ActionBins:
    """The range of each number and how many bins it has.

    `single` counts in fp32, as the released video models were trained: EPS is lost beside a range of 2 there, so that a
    gripper at rest, RT-1's commonest action by far, is in bin 128 and not in 127.
    """

    ranges: tuple[tuple[float, float], ...]
    bins: int = 256
    single: bool = False

    def __post_init__(self) -> None:
        for i, (low, high) in enumerate(self.ranges):
            if not low < high:
                raise ValueError(f"ranges: number {i} goes from {low} to {high}")

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """Bins of [..., A] actions; values outside the range go to its ends."""
        kind = np.float32 if self.single else np.float64
        low, high = np.array(self.ranges, kind).T
        if actions.shape[-1] != len(low):
            raise ValueError(f"actions have {actions.shape[-1]} numbers, the ranges {len(low)}")
        if not np.isfinite(actions).all():
            raise ValueError("an action is not finite")
        share = np.clip((actions.astype(kind) - low) / (high - low + kind(EPS)), 0.0, 1.0)
        return np.minimum((share * self.bins).astype(np.int64), self.bins - 1)

    def decode(self, bins: np.ndarray) -> np.ndarray:
        """The middle of each bin."""
        low, high = np.array(self.ranges, np.float64).T
        return low + (bins + 0.5) / self.bins * (high - low)


def quantile_ranges(actions_NA: np.ndarray, share: float = 0.001) -> tuple[tuple[float, float], ...]:
    """Ranges that leave out the extreme `share` at both ends: one outlier then does not cost the others their
    resolution.
    """
    low, high = np.quantile(actions_NA, share, axis=0), np.quantile(actions_NA, 1 - share, axis=0)
    return tuple((float(a), float(b) if b > a else float(a) + 1.0) for a, b in zip(low, high, strict=True))
