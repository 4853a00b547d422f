"""The replay store's confidence filter: the step is the unit, the current actor's perplexity decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.rng import permutation
from ..statistics import Estimate, proportion
from .steps import WebTrajectory

LOW, HIGH, RATIO = 0.5, 0.95, 2.0  # keep 0.5 < p <= 0.95: perplexity in [1/0.95, 1/0.5); at most twice the new steps


def geometric_mean(logprobs: Sequence[float]) -> float:
    """p = exp(mean log-prob) of an action's tokens, without the token that ends it; its perplexity is 1/p."""
    if len(logprobs) == 0:
        raise ValueError("an action without tokens has no probability")
    return math.exp(sum(logprobs) / len(logprobs))


@dataclass(frozen=True)
class Place:
    """A step of a trajectory, by its position in the list of trajectories."""

    trajectory: int
    step: int


def candidates(earlier: Sequence[WebTrajectory], seed: int) -> list[Place]:
    """Steps that may be replayed: of every task one success, over all earlier phases and ranks. Which one is a
    matter of the seed.
    """
    chosen: dict[str, int] = {}
    for index in permutation(len(earlier), seed, 1):
        if earlier[index].success:
            chosen.setdefault(earlier[index].intent, index)
    return [Place(i, s) for i in sorted(chosen.values()) for s, step in enumerate(earlier[i].steps) if step.learn]


def choose(
    places: Sequence[Place],
    probabilities: Sequence[float],
    new_steps: int,
    seed: int,
    low: float = LOW,
    high: float = HIGH,
    ratio: float = RATIO,
) -> list[Place]:
    """Of the candidates those that the actor finds neither sure nor unlikely, at most `ratio` times as many as the
    new steps.
    """
    kept = [place for place, p in zip(places, probabilities, strict=True) if low < p <= high]
    return [kept[i] for i in permutation(len(kept), seed, 2)[: int(ratio * new_steps)]]


def bins(probabilities: Sequence[float], low: float = LOW, high: float = HIGH) -> dict[str, Estimate]:
    """How the candidates fall into the paper's perplexity bins."""
    n = len(probabilities)
    counts = {
        f"sure [1, 1/{high:g})": sum(p > high for p in probabilities),
        f"kept [1/{high:g}, 1/{low:g})": sum(low < p <= high for p in probabilities),
        f"unlikely [1/{low:g}, inf)": sum(p <= low for p in probabilities),
    }
    return {name: proportion(count, n) for name, count in counts.items()}
