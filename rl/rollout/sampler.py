"""The sampler protocol: token ids in, token ids with log-probs out.

Log-probs are of the temperature-scaled, untruncated distribution, which is what the trainer scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from ...data.trajectory import Invalid

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How to continue. Temperature 0 is greedy; its log-probs are those at temperature 1."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    allowed: tuple[int, int] | None = None  # half-open range of token ids that may be sampled

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: {self.max_new_tokens} must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature: {self.temperature} must be 0 (greedy) or above")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p} must be in (0, 1]")


@dataclass(frozen=True)
class SampleRequest:
    """One continuation. `key` alone decides the random numbers: (seed, prompt id, sample index, turn)."""

    ids: tuple[int, ...]
    key: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Sample:
    """What was sampled, and by which version of the weights."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    weight_version: int


class Sampler(Protocol):
    """Anything that continues token sequences. An infrastructure fault comes back as Invalid, never as an empty sample."""

    def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]: ...
