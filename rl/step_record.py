"""What the record says of a step: rewards, the engine's sums as means, and the numbers at which a run stops."""

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
    """Reward statistics over all ranks; Invalid samples are counted and kept out."""
    rewards = [t.reward for t in trajectories if not isinstance(t.reward, Invalid)]
    everywhere = gather((rewards, len(trajectories) - len(rewards)))
    values = [r for part, _ in everywhere for r in part]
    estimate = mean(values)
    equal = len(set(values)) <= 1  # the mean of equal numbers may differ from them by rounding, which is no spread
    spread = 0.0 if equal else (sum((v - estimate.value) ** 2 for v in values) / max(len(values) - 1, 1)) ** 0.5
    return {
        "reward/mean": estimate.value,
        "reward/std": spread,
        "reward/perfect": sum(v >= 1.0 for v in values) / max(len(values), 1),
        "invalid": sum(count for _, count in everywhere),
    }


def training_values(results: Sequence[StepResult], sampled: int) -> dict[str, Any]:
    """The engine's sums over a rollout's updates as means over the tokens that were trained on; the loss is the mean
    of the updates'.
    """
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
    if trained:  # what was not measured has no value, not the value 0
        values["entropy"] = sums["entropy"] / trained
        values["clip_fraction"] = (sums["clipped_low"] + sums["clipped_high"]) / trained
    first_tokens = first["pg_tokens"] or first["tokens"]
    # sampler against trainer: later updates have moved away from what was sampled, as they should
    if first_tokens and "drift" in first:
        values["logprob_drift/mean"] = first["drift"] / first_tokens
    if first.get("routing_given"):  # of the experts that tokens were sent to when they were sampled
        values["routing/disagreed"] = first["routing_disagreed"] / first["routing_given"]
    if "balance_loss" in sums:
        values["balance_loss"] = sums["balance_loss"] / len(results)
    if trained and "reference_kl" in sums:
        values["kl"] = sums["reference_kl"] / trained
    return values


def lengths_table(name: str, sampled: Counter[int], trained: Counter[int]) -> dict[str, Any]:
    """How long answers were: all that were sampled, and those that were trained on."""

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
    """Stop the run by the name of a number that is NaN or infinite."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise NumericsError(
                f"step {step}: {name} is {value}; the last checkpoint is good: lower the learning rate and start a "
                "new run"
            )


def check(values: dict[str, Any], drift_gate: float, step: int) -> None:
    """Stop by name rather than train on numbers that cannot be right."""
    require_finite(values, step)
    if values["impossible_logprobs"]:
        raise NumericsError(
            f"step {step}: {values['impossible_logprobs']:.0f} log-probs lie above 0; the loss kernel or the weights "
            "are broken"
        )
    require_agreement(values, drift_gate, f"step {step}")


def require_agreement(values: dict[str, Any], drift_gate: float, where: str) -> None:
    """Stop by name where the sampler's log-probs are not the trainer's."""
    if values.get("logprob_drift/mean", 0.0) > drift_gate:
        drift = f"{values['logprob_drift/mean']:.3g}"
        raise NumericsError(
            f"{where}: sampler and trainer log-probs differ by {drift} on average, above drift_gate = {drift_gate}"
        )
