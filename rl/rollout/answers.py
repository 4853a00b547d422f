"""What was sampled for the requests of a continuous batch, read from the device window by window.

Shape suffixes: B rows, W steps of a window, M rows with the same stop tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...core.errors import NumericsError
from .sampler import Sample, SampleRequest, interleave


@dataclass(frozen=True)
class Window:
    """What a run of steps sampled, on its way to the host."""

    tokens_WB: torch.Tensor
    logprobs_WB: torch.Tensor
    ready: torch.cuda.Event | None
    index_B: np.ndarray  # the rows' requests
    count_B: np.ndarray  # tokens each row had when it began
    made_B: np.ndarray  # tokens it got


class Answers:
    """Tokens and log-probs of requests by their numbers. Of a stream, requests come and go, and every token is marked
    with the version that sampled it.
    """

    def __init__(self, requests: Sequence[SampleRequest]) -> None:
        self.requests = list(requests)
        width = max(r.params.max_new_tokens for r in requests)
        self.ids = np.zeros((len(requests), width), np.int64)
        self.logprobs = np.zeros((len(requests), width), np.float32)
        self.ends = np.array([r.params.max_new_tokens for r in requests])  # tokens of an answer, as far as is known
        self.read = np.zeros(len(requests), np.int64)
        self.stopped = np.zeros(len(requests), bool)
        self.versions: np.ndarray | None = None  # of a stream
        self.spare: list[int] = []  # of a stream: numbers of requests that are gone

    def mark_versions(self) -> None:
        """Become those of a stream."""
        self.versions = np.zeros(self.ids.shape, np.int64)

    def add(self, request: SampleRequest) -> int:
        """The number of another request of a stream."""
        if not self.spare:
            more = len(self.requests)  # twice as many: not again with every request
            self.spare += range(2 * more - 1, more - 1, -1)
            self.requests += [request] * more
            self._grow(0, more)
            self.ends, self.read, self.stopped = (_grown(x, 0, more) for x in (self.ends, self.read, self.stopped))
        wider = request.params.max_new_tokens - self.ids.shape[1]
        if wider > 0:
            self._grow(1, wider)
        index = self.spare.pop()
        self.requests[index] = request
        self.ends[index], self.read[index], self.stopped[index] = request.params.max_new_tokens, 0, False
        return index

    def _grow(self, axis: int, more: int) -> None:
        assert self.versions is not None
        self.ids, self.logprobs, self.versions = (
            _grown(x, axis, more) for x in (self.ids, self.logprobs, self.versions)
        )

    def is_read(self, index: int) -> bool:
        """Whether all tokens of a request have been read."""
        return bool(self.read[index] >= self.ends[index])

    def sequence(self, index: int, count: int) -> tuple[int, ...]:
        """Prompt, sampled and forced tokens of a request that has sampled `count`."""
        request = self.requests[index]
        return request.ids + interleave(self.ids[index, :count].tolist(), [0.0] * count, request, "length", 0).ids

    def sample(self, index: int, version: int) -> Sample:
        """A request's continuation, when it is over. `version` counts where tokens are not marked."""
        n = int(self.ends[index])
        if not np.isfinite(self.logprobs[index, :n]).all():
            raise NumericsError("the sampler met a log-prob that is not finite; the weights hold NaN or infinity")
        by = version if self.versions is None else self.versions[index, :n].tolist()
        ids, logprobs = self.ids[index, :n].tolist(), self.logprobs[index, :n].tolist()
        return interleave(ids, logprobs, self.requests[index], "stop" if self.stopped[index] else "length", by)

    def take(self, window: Window, version: int) -> np.ndarray:
        """Put a window's tokens where they belong; a stop ends its row. Returns the rows that are over with it."""
        if window.ready is not None:
            window.ready.synchronize()
        tokens_BW, logprobs_BW = window.tokens_WB.numpy().T, window.logprobs_WB.numpy().T
        index_B = window.index_B
        place_BW = window.count_B[:, None] + np.arange(tokens_BW.shape[1])
        made_BW = np.arange(tokens_BW.shape[1]) < window.made_B[:, None]
        ok_BW = made_BW & (place_BW < self.ends[index_B][:, None])
        # by identity: hashing long lists takes longer than the search
        stops: dict[int, tuple[tuple[int, ...], list[int]]] = {}
        for i, index in enumerate(index_B.tolist()):
            if ids := self.requests[index].params.stop_ids:
                stops.setdefault(id(ids), (ids, []))[1].append(i)
        for ids, members in stops.values():
            hit_MW = np.isin(tokens_BW[members], ids) & ok_BW[members]
            ended = np.flatnonzero(hit_MW.any(1))
            at = np.array(members)[ended]
            self.stopped[index_B[at]] = True
            self.ends[index_B[at]] = place_BW[at, hit_MW[ended].argmax(1)] + 1
        ok_BW = made_BW & (place_BW < self.ends[index_B][:, None])
        where = np.broadcast_to(index_B[:, None], place_BW.shape)[ok_BW], place_BW[ok_BW]
        self.ids[where], self.logprobs[where] = tokens_BW[ok_BW], logprobs_BW[ok_BW]
        if self.versions is not None:
            self.versions[where] = version
        read_B = np.minimum(window.count_B + window.made_B, self.ends[index_B])
        over_B = (read_B >= self.ends[index_B]) & (window.count_B < self.ends[index_B])
        self.read[index_B] = read_B
        return np.flatnonzero(over_B)


def _grown(array: np.ndarray, axis: int, more: int) -> np.ndarray:
    """An array with so many zeros more."""
    return np.pad(array, [(0, more if i == axis else 0) for i in range(array.ndim)])
