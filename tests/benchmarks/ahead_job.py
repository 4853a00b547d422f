"""The benchmark of rollouts ahead of training, in a rank of the pool."""

from dataclasses import asdict
from typing import Any

from terrella.benchmarks import ahead


def run(case: str, ks: list[int], seeds: int, steps: int, step_s: float) -> dict[int, list[dict[str, Any]]]:
    found = ahead.measure(ahead.CASES[case], ks, range(seeds), steps, step_s)
    return {
        k: [{**asdict(one), "per_hour": one.per_hour, "final": one.final, "before": one.before} for one in outcomes]
        for k, outcomes in found.items()
    }
