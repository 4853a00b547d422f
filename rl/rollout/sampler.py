"""The sampler protocol: token ids in, token ids with log-probs out.

Log-probs are of the temperature-scaled, untruncated and unpenalised distribution, which is what the trainer scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from ...core.errors import WorkerError
from ...data.trajectory import Invalid, Routing

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
    repetition_penalty: float = 1.0  # above 1: tokens that occurred in prompt or answer become less likely

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: {self.max_new_tokens} must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature: {self.temperature} must be 0 (greedy) or above")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p} must be in (0, 1]")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty: {self.repetition_penalty} must be above 0")


class Unpublished(WorkerError):
    """Servers lost weights that only all trainer ranks together can send: publish, then sample again."""


Forced = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class SampleRequest:
    """One continuation. `key` alone decides the random numbers: (seed, prompt id, sample index, turn).

    `forced` inserts given tokens between sampled spans: each entry (n, ids) inserts `ids` once n tokens were sampled,
    with n rising and below max_new_tokens. Only sampled tokens count towards max_new_tokens.
    """

    ids: tuple[int, ...]
    key: tuple[int, ...]
    params: SamplingParams
    forced: Forced = ()

    def __post_init__(self) -> None:
        places = [at for at, _ in self.forced]
        if places != sorted(set(places)) or (
            places and not (places[0] > 0 and places[-1] < self.params.max_new_tokens)
        ):
            raise ValueError(f"forced: places {places} must rise and lie between 1 and max_new_tokens - 1")
        if any(not ids for _, ids in self.forced):
            raise ValueError("forced: a span needs at least one token")

    @property
    def length(self) -> int:
        """The most positions that prompt and continuation can take."""
        return len(self.ids) + self.params.max_new_tokens + sum(len(ids) for _, ids in self.forced)


@dataclass(frozen=True)
class Sample:
    """What was sampled, and by which version of the weights. `ids` include forced tokens, with a log-prob of 0.

    If weights changed meanwhile, `versions` has one entry per id and `weight_version` is the oldest.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    weight_version: int
    forced: tuple[bool, ...] | None = None  # which of `ids` were given; None means none of them
    versions: tuple[int, ...] | None = None  # None means `weight_version` for all
    experts: Routing | None = None  # of prompt and `ids`; the last id was not fed and has none

    @property
    def given(self) -> tuple[bool, ...]:
        """For every id, whether it was forced rather than sampled."""
        return self.forced if self.forced is not None else (False,) * len(self.ids)


def interleave(
    ids: list[int], logprobs: list[float], request: SampleRequest, finish: FinishReason, version: int | list[int]
) -> Sample:
    """Merge sampled tokens with the request's forced ones; spans after an early end are left out. `version` is one for
    all tokens, or one per token.
    """
    versions = version if isinstance(version, list) and len(set(version)) > 1 else None
    version = min(version) if isinstance(version, list) else version
    if not request.forced:
        return Sample(tuple(ids), tuple(logprobs), finish, version, None, tuple(versions) if versions else None)
    spans = dict(request.forced)
    out_ids: list[int] = []
    out_logprobs: list[float] = []
    given: list[bool] = []
    by: list[int] = []
    for count, (token, logprob) in enumerate(zip(ids, logprobs, strict=True), 1):
        out_ids.append(token)
        out_logprobs.append(logprob)
        given.append(False)
        if count in spans and count < len(ids):
            out_ids += spans[count]
            out_logprobs += [0.0] * len(spans[count])
            given += [True] * len(spans[count])
        if versions:
            by += [versions[count - 1]] * (len(out_ids) - len(by))
    return Sample(tuple(out_ids), tuple(out_logprobs), finish, version, tuple(given), tuple(by) or None)


class Sampler(Protocol):
    """Anything that continues token sequences. An infrastructure fault comes back as Invalid, never as an empty
    sample.
    """

    def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]: ...
