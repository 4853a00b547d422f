"""Forced tokens for engines without support for them: one plain continuation per sampled span, all requests
together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ...core.rng import fold
from ...data.trajectory import Invalid, Routing, continued
from .sampler import FinishReason, Sample, SampleRequest, interleave


@dataclass(frozen=True)
class Plain:
    """A request for at most `limit` sampled tokens after `ids`."""

    request: SampleRequest
    ids: tuple[int, ...]
    limit: int
    seed: int


@dataclass(frozen=True)
class Piece:
    """The result of a plain continuation."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    experts: Routing | None = None  # of what was continued and `ids`


@dataclass
class _Progress:
    ids: list[int] = field(default_factory=list)  # sampled
    logprobs: list[float] = field(default_factory=list)
    whole: tuple[int, ...] = ()  # prompt, sampled and forced so far
    span: int = 0
    experts: Routing | None = None


def generate_in_spans(
    requests: Sequence[SampleRequest], generate: Callable[[list[Plain]], list[Piece | Invalid]], version: int
) -> list[Sample | Invalid]:
    """Run every request span by span; a fault in one span makes that request Invalid."""
    state = [_Progress(whole=r.ids) for r in requests]
    results: list[Sample | Invalid | None] = [None] * len(requests)
    live = list(range(len(requests)))
    while live:
        plain = []
        for i in live:
            places = [at for at, _ in requests[i].forced] + [requests[i].params.max_new_tokens]
            limit = places[state[i].span] - len(state[i].ids)
            seed = fold(*requests[i].key, state[i].span) >> 1  # vLLM takes 63 bits
            plain.append(Plain(requests[i], state[i].whole, limit, seed))
        going = []
        for i, piece in zip(live, generate(plain), strict=True):
            if isinstance(piece, Invalid):
                results[i] = piece
                continue
            s, forced = state[i], requests[i].forced
            if piece.experts is not None:  # tokens read earlier keep their choices
                read = len(s.experts) - 1 if s.experts else 0
                s.experts = continued(s.experts, piece.experts, read, len(piece.experts))
            s.ids += piece.ids
            s.logprobs += piece.logprobs
            s.whole += piece.ids
            if piece.finish == "length" and s.span < len(forced):
                s.whole += forced[s.span][1]
                s.span += 1
                going.append(i)
            else:
                sample = interleave(s.ids, s.logprobs, requests[i], piece.finish, version)
                results[i] = replace(sample, experts=s.experts)
        live = going
    return [r for r in results if r is not None]
