"""Reading in an order, split over data-parallel ranks and worker processes, with a state that resumes exactly.

The stream of positions 0, 1, 2, ... is global. Ranks deal the positions that are not yet consumed among themselves in
turn, so the state is only which positions are consumed: all below `position`, and those of `ahead`. Ranks in step leave
`ahead` empty.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from ...core.errors import ConfigError
from .dataset import ShardSet
from .order import ShuffledOrder

CHUNK = 1024


@dataclass(frozen=True)
class ReaderState:
    """Where a stream stands, for all ranks together."""

    identity: str  # of the data and the order
    position: int = 0  # every position below it is consumed
    ahead: tuple[int, ...] = ()  # consumed positions above it, rising

    def to_json(self) -> str:
        return json.dumps(
            {"identity": self.identity, "position": self.position, "ahead": _runs(self.ahead)}, separators=(",", ":")
        )

    @classmethod
    def from_json(cls, text: str) -> ReaderState:
        saved = json.loads(text)
        ahead = [p for first, count in saved["ahead"] for p in range(first, first + count)]
        return cls(saved["identity"], saved["position"], tuple(ahead))


class Reader:
    """Iterates over the samples of `data` in an order, for one rank.

    `state()` is this rank's; merge_states() makes the one to store. When ranks take equally many samples,
    `state_in_step()` is the merged state without any communication.
    """

    def __init__(
        self,
        data: ShardSet,
        order: ShuffledOrder | None = None,
        *,
        rank: int = 0,
        ranks: int = 1,
        state: ReaderState | str | None = None,
        workers: int = 0,
        epochs: int | None = None,
    ) -> None:
        self.data, self.order = data, order or ShuffledOrder(data.counts)
        if not 0 <= rank < ranks:
            raise ConfigError(f"rank {rank} of {ranks} ranks: the rank must be in 0..{ranks - 1}")
        self.rank, self.ranks, self.workers, self.epochs = rank, ranks, workers, epochs
        self.identity = xxhash.xxh3_128_hexdigest(f"{data.fingerprint}\n{self.order.identity()}".encode())
        if isinstance(state, str):
            state = ReaderState.from_json(state)
        if state is not None and state.identity != self.identity:
            raise ConfigError(
                f"the saved position belongs to other data or another order ({state.identity}, here {self.identity}): "
                "the shards, the quarantine or the seed changed since; begin anew or restore them"
            )
        self._base = state or ReaderState(self.identity)
        self.taken = 0  # by this rank, since the base state

    def state(self) -> tuple[ReaderState, int, int, int]:
        """What merge_states needs of this rank: the base, the rank, the number of ranks, and how many it took."""
        return self._base, self.rank, self.ranks, self.taken

    def state_in_step(self) -> ReaderState:
        """The global state when every rank took as many samples as this one."""
        return merge_states([(self._base, r, self.ranks, self.taken) for r in range(self.ranks)])

    def _positions(self, start: int, stop: int) -> np.ndarray:
        return free_positions(self._base, np.arange(start, stop) * self.ranks + self.rank)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Samples from where this rank stands; without `epochs` the stream is endless."""
        if self.workers:
            from .workers import read_ahead

            source = read_ahead(self.blocks, self.taken, self.workers)
        else:
            source = self.blocks(self.taken)
        for block in source:
            for sample in block:
                self.taken += 1  # before it is handed out: a sample counts as consumed once the caller has it
                yield sample

    def blocks(
        self, start: int, worker: int = 0, workers: int = 1, size: int = CHUNK
    ) -> Iterator[Iterator[dict[str, Any]]]:
        """This rank's samples from its start-th on in blocks of `size`; with several workers every `workers`-th
        block.
        """
        limit = None if self.epochs is None else self.epochs * self.order.size
        size = min(size, max(16, self.order.size))
        for at in itertools.count(start + worker * size, size * workers):
            positions = self._positions(at, at + size)
            if limit is not None:
                positions = positions[positions < limit]
            if len(positions):
                yield self.data.read_many(self.order.ids(positions))
            if len(positions) < size:
                return


def free_positions(state: ReaderState, nth: np.ndarray) -> np.ndarray:
    """The n-th positions that are not consumed in a state."""
    ahead = np.asarray(state.ahead, dtype=np.int64)
    if not len(ahead):
        return state.position + nth
    # before ahead[k] lie ahead[k] - position - k free ones
    free_before = ahead - state.position - np.arange(len(ahead))
    return state.position + nth + np.searchsorted(free_before, nth, side="right")


def merge_states(parts: Sequence[tuple[ReaderState, int, int, int]]) -> ReaderState:
    """One state out of every rank's: exact also when some ranks took more samples than others."""
    base, _, ranks, _ = parts[0]
    if sorted(p[1] for p in parts) != list(range(ranks)) or any(p[0] != base or p[2] != ranks for p in parts):
        raise ConfigError(f"the states of all {ranks} ranks of one run are needed, each once")
    least = min(p[3] for p in parts)
    taken = [np.arange(least, count) * ranks + rank for _, rank, _, count in parts]
    extra = free_positions(base, np.sort(np.concatenate(taken)))
    beyond = np.union1d(extra, np.asarray(base.ahead, dtype=np.int64)).astype(np.int64)
    frontier = int(free_positions(base, np.array([least * ranks]))[0])
    beyond = beyond[beyond >= frontier]
    # positions right at the frontier belong below it
    solid = int(np.searchsorted(beyond - np.arange(len(beyond)), frontier, side="right"))
    return ReaderState(base.identity, frontier + solid, tuple(beyond[solid:].tolist()))


def _runs(positions: Sequence[int]) -> list[list[int]]:
    """Rising positions as [first, count] runs."""
    runs: list[list[int]] = []
    for p in positions:
        if runs and p == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([p, 1])
    return runs
