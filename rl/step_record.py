"""What is recorded of a step: rewards, the engine's sums as means, and the checks that stop a run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ..core.engine import StepResult
from ..core.errors import NumericsError
from ..data.trajectory import Invalid, Trajectory
from .statistics import mean


def describe(trajectories: Sequence[Trajectory], gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
    """Reward statistics over all ranks; Invalid samples are only counted."""
    rewards = [t.reward for t in trajectories if not isinstance(t.reward, Invalid)]
    everywhere = gather((rewards, len(trajectories) - len(rewards)))
    values = [r for part, _ in everywhere for r in part]
    estimate = mean(values)
    equal = len(set(values)) <= 1  # rounding in the mean of equal numbers must not look like a spread
    spread = 0.0 if equal else (sum((v - estimate.value) ** 2 for v in values) / max(len(values) - 1, 1)) ** 0.5
    return {
        "reward/mean": estimate.value,
        "reward/std": spread,
        "reward/perfect": sum(v >= 1.0 for v in values) / max(len(values), 1),
        "invalid": sum(count for _, count in everywhere),
    }


def training_values(results: Sequence[StepResult], sampled: int) -> dict[str, Any]:
    """The engine's sums over a rollout's updates as means over trained tokens; the loss is the mean over updates."""
    sums = {name: sum(r.metrics[name] for r in results) for name in results[0].metrics}
    first = results[0].metrics
    trained = sums["pg_tokens"] or sums["tokens"]  # imitation has no policy term
    values = {
        "loss": sums["loss"] / len(results),
        "impossible_logprobs": sums["impossible"],
        "trained_share": trained / max(sampled, 1),
        "grad_norm": sum(r.grad_norm for r in results) / len(results),
        "lr": results[-1].lr,
    }
    if trained:  # what was not measured is left out, not 0
        values["entropy"] = sums["entropy"] / trained
        values["clip_fraction"] = (sums["clipped_low"] + sums["clipped_high"]) / trained
    first_tokens = first["pg_tokens"] or first["tokens"]
    # sampler against trainer, in the first update only: later ones are meant to move away from the sampler
    if first_tokens and "drift" in first:
        values["logprob_drift/mean"] = first["drift"] / first_tokens
    if first.get("routing_given"):  # against the experts that the sampler chose
        values["routing/disagreed"] = first["routing_disagreed"] / first["routing_given"]
    if "balance_loss" in sums:
        values["balance_loss"] = sums["balance_loss"] / len(results)
    if trained and "reference_kl" in sums:
        values["kl"] = sums["reference_kl"] / trained
    return values


def lengths_table(name: str, sampled: Counter[int], trained: Counter[int]) -> dict[str, Any]:
    """Lengths of the answers that were sampled, and of those that were trained on."""

    def cells(counts: Counter[int]) -> list[float]:
        lengths = sorted(counts.elements())
        places = [lengths[min(int(share * len(lengths)), len(lengths) - 1)] for share in (0.1, 0.5, 0.9, 0.99)]
        return [len(lengths), sum(lengths) / len(lengths), *places, lengths[-1]]

    return {
        "title": f"Lengths of answers: {name}",
        "columns": ["answers", "mean", "10 %", "50 %", "90 %", "99 %", "longest"],
        "rows": [
            {"name": "sampled", "kind": "baseline", "cells": cells(sampled)},
            {"name": "trained", "kind": "model", "cells": cells(trained)},
        ],
        "unit": "tokens",
        "note": "Sampled tokens of an answer, since the run was last begun. Steps are trained whole and in order, so "
        "that both rows are equal but for answers that were sampled again after a fault, or left out by the algorithm.",
    }


def require_finite(values: dict[str, Any], step: int) -> None:
    """Stop the run, naming a value that is NaN or infinite."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise NumericsError(
                f"step {step}: {name} is {value}; the last checkpoint is good: lower the learning rate and start a "
                "new run"
            )


def check(values: dict[str, Any], drift_gate: float, step: int) -> None:
    """Stop the run rather than train on values that cannot be right."""
    require_finite(values, step)
    if values["impossible_logprobs"]:
        raise NumericsError(
            f"step {step}: {values['impossible_logprobs']:.0f} log-probs lie above 0; the loss kernel or the weights "
            "are broken"
        )
    require_agreement(values, drift_gate, f"step {step}")


def require_agreement(values: dict[str, Any], drift_gate: float, where: str) -> None:
    """Stop the run if sampler and trainer disagree on log-probs."""
    if values.get("logprob_drift/mean", 0.0) > drift_gate:
        drift = f"{values['logprob_drift/mean']:.3g}"
        raise NumericsError(
            f"{where}: sampler and trainer log-probs differ by {drift} on average, above drift_gate = {drift_gate}"
        )
