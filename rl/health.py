"""Collapse alarms: a run that is going wrong says so by name, and does what was chosen: warn, or stop. Importable
without torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..core.errors import NumericsError

Reaction = Literal["warn", "stop", "ignore"]


@dataclass(frozen=True)
class HealthConfig:
    """When each alarm sounds, and what follows. An alarm needs `patience` bad steps in a row; relative ones compare
    with the mean of the first `baseline` steps."""

    baseline: int = 10  # first steps whose means later ones are compared with
    patience: int = 10  # bad steps in a row before an alarm sounds
    reward_std_share: float = 0.1  # below this share of the first steps' reward std
    entropy_floor: float = 0.01  # nats a token
    repetition_ceiling: float = 0.5  # share of repeated 4-grams
    truncated_ceiling: float = 0.5  # share of samples cut off at the length limit
    length_factor: float = 4.0  # above this many times the first steps' mean length
    drift_factor: float = 10.0  # sampler/trainer log-prob drift above this many times the first steps' mean
    on_reward_std: Reaction = "warn"  # what follows when rewards hardly differ
    on_entropy: Reaction = "warn"  # what follows when entropy falls below its floor
    on_repetition: Reaction = "warn"  # what follows when samples repeat themselves
    on_length: Reaction = "warn"  # what follows when samples grow long or are cut off
    on_drift: Reaction = "stop"  # what follows when sampler and trainer disagree

    def __post_init__(self) -> None:
        if self.baseline < 1 or self.patience < 1:
            raise ValueError(
                f"patience: baseline and patience must be at least 1, not {self.baseline} and {self.patience}"
            )


@dataclass(frozen=True)
class Alarm:
    """One alarm at one step."""

    name: str
    step: int
    message: str
    reaction: Reaction


@dataclass
class Health:
    """Watches a stage's metrics. `state` goes into the checkpoint, so that a resumed run sounds the same alarms."""

    config: HealthConfig = field(default_factory=HealthConfig)
    first: dict[str, list[float]] = field(default_factory=dict)
    bad: dict[str, int] = field(default_factory=dict)

    def observe(self, step: int, values: Mapping[str, Any]) -> list[Alarm]:
        """Alarms that sound at this step; one of reaction `stop` is raised as an error after all were found."""
        c = self.config
        rules = [
            ("reward_std", c.on_reward_std, "reward/std", self._below, c.reward_std_share, "rewards hardly differ"),
            ("entropy", c.on_entropy, "entropy", _under, c.entropy_floor, "the policy is almost deterministic"),
            ("repetition", c.on_repetition, "repetition", _over, c.repetition_ceiling, "answers repeat"),
            ("truncated", c.on_length, "truncated", _over, c.truncated_ceiling, "answers hit the length limit"),
            ("length", c.on_length, "length/mean", self._above, c.length_factor, "answers grew long"),
            ("drift", c.on_drift, "logprob_drift/mean", self._above, c.drift_factor, "log-probs drift apart"),
        ]
        alarms = []
        for name, reaction, key, passes, bound, meaning in rules:
            hit, limit = passes(key, values, bound)
            self.bad[name] = self.bad.get(name, 0) + 1 if hit else 0
            if reaction != "ignore" and self.bad[name] >= c.patience:
                text = f"{meaning}: {key} = {values[key]:.4g} against {limit:.4g} for {self.bad[name]} steps"
                alarms.append(Alarm(name, step, text, reaction))
        stopping = [a for a in alarms if a.reaction == "stop"]
        if stopping:
            raise NumericsError(
                f"step {step}: alarm {stopping[0].name}: {stopping[0].message}; set health.on_* to warn to go on"
            )
        return alarms

    def _mean(self, key: str, values: Mapping[str, Any]) -> float | None:
        """Mean of the first steps, or None while they are still being collected."""
        seen = self.first.setdefault(key, [])
        if len(seen) < self.config.baseline:
            if key in values:
                seen.append(float(values[key]))
            return None
        return sum(seen) / len(seen)

    def _below(self, key: str, values: Mapping[str, Any], share: float) -> tuple[bool, float]:
        mean = self._mean(key, values)
        if mean is None or key not in values:
            return (False, 0.0)
        return (values[key] <= share * mean, share * mean)

    def _above(self, key: str, values: Mapping[str, Any], factor: float) -> tuple[bool, float]:
        mean = self._mean(key, values)
        if mean is None or key not in values:
            return (False, 0.0)
        return (mean > 0 and values[key] > factor * mean, factor * mean)

    def state(self) -> dict[str, Any]:
        return {"first": self.first, "bad": self.bad}

    def load(self, state: Mapping[str, Any]) -> None:
        self.first, self.bad = {k: list(v) for k, v in state["first"].items()}, dict(state["bad"])


def _under(key: str, values: Mapping[str, Any], limit: float) -> tuple[bool, float]:
    return (key in values and values[key] < limit, limit)


def _over(key: str, values: Mapping[str, Any], limit: float) -> tuple[bool, float]:
    return (key in values and values[key] > limit, limit)


def repetition(ids: Sequence[int], n: int = 4) -> float:
    """Share of the n-grams that occurred before in the same answer; 0 for answers shorter than n."""
    grams = Counter(tuple(ids[i : i + n]) for i in range(len(ids) - n + 1))
    total = sum(grams.values())
    return (total - len(grams)) / total if total else 0.0


def sample_values(answers: Sequence[Sequence[int]], limit: int) -> dict[str, float]:
    """What the alarms watch, of sampled answers: repetition, mean length, share cut off at the limit."""
    count = max(len(answers), 1)
    return {
        "repetition": sum(repetition(a) for a in answers) / count,
        "length/mean": sum(len(a) for a in answers) / count,
        "truncated": sum(len(a) >= limit for a in answers) / count,
    }
