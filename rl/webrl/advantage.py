"""Advantages and weights of WebRL and of the methods it is compared with, for one trajectory at a time.

`values` has one entry a state: V(s_0) .. V(s_T), the last one that of the state after the last step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MARGIN = 0.05  # the release's bonus threshold on V(s') - V(s)
MOST = 20.0  # of AWR's weights
PERCENTILE = 0.7  # of filtered BC


def _check(steps: int, values: Sequence[float]) -> None:
    if steps < 1 or len(values) != steps + 1:
        raise ValueError(f"values: {steps} steps need {steps + 1} values, not {len(values)}")


def mixed(reward: float, values: Sequence[float], lam: float = 0.5) -> list[float]:
    """The paper's equation 9: lam * (r_t + V(s_t+1) - V(s_t)) + (1 - lam) * (r_T - V(s_t)); r_t is 0 before the last
    step, and nothing follows the end, so V after the last step is 0."""
    steps = len(values) - 1
    _check(steps, values)
    found = []
    for t in range(steps):
        last = t == steps - 1
        one = (reward if last else values[t + 1]) - values[t]
        found.append(lam * one + (1 - lam) * (reward - values[t]))
    return found


def released(reward: float, values: Sequence[float], returns: Sequence[float]) -> list[float]:
    """The release's raw advantage, clamped to [-1, 1]; its loss keeps the sign alone."""
    steps = len(values) - 1
    _check(steps, values)
    raw = [values[t + 1] - values[t] - MARGIN + reward + returns[t] for t in range(steps)]
    return [max(-1.0, min(1.0, a)) for a in raw]


def discounted(reward: float, values: Sequence[float], gamma: float = 0.9) -> list[float]:
    """AWR: the discounted final reward minus the value."""
    steps = len(values) - 1
    _check(steps, values)
    return [gamma ** (steps - 1 - t) * reward - values[t] for t in range(steps)]


def doubly_robust(reward: float, values: Sequence[float], lam: float = 0.5) -> list[float]:
    """DigiRL's step advantage: lam^(T-1-t) of the final reward, the rest from the critic's next value, minus the
    value.
    """
    steps = len(values) - 1
    _check(steps, values)
    found = []
    for t in range(steps):
        trust = lam ** (steps - 1 - t)
        ahead = reward if t == steps - 1 else values[t + 1]
        found.append(trust * reward + (1 - trust) * ahead - values[t])
    return found


def exponential_weight(advantage: float) -> float:
    """AWR's weight exp(A), bounded."""
    return min(MOST, math.exp(min(advantage, 50.0)))


def filtered(rewards: Sequence[float]) -> list[bool]:
    """Filtered BC: trajectories that reach the percentile of all rewards and got any reward at all."""
    if not rewards:
        return []
    bar = sorted(rewards)[min(len(rewards) - 1, int(PERCENTILE * len(rewards)))]
    return [r > 0 and r >= bar for r in rewards]
