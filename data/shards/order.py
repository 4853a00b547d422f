"""Orders: which sample comes at which position of an endless stream. Pure functions of (seed, position), so resuming costs nothing.

Random numbers come from a fixed integer hash, not from a library's generator: an order never changes with a version of numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import xxhash

_C1, _C2, _C3 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def hash_counters(key: tuple[int, ...], counters: np.ndarray) -> np.ndarray:
    """64 random bits for each counter under a key (the splitmix64 finaliser over a keyed counter)."""
    seed = np.uint64(xxhash.xxh3_64_intdigest(np.array(key, dtype="<i8").tobytes()))
    with np.errstate(over="ignore"):
        x = counters.astype(np.uint64) * _C1 + seed
        x = (x ^ (x >> np.uint64(30))) * _C2
        x = (x ^ (x >> np.uint64(27))) * _C3
    return x ^ (x >> np.uint64(31))


def permutation(key: tuple[int, ...], count: int) -> np.ndarray:
    """A permutation of range(count) under a key."""
    return np.argsort(hash_counters(key, np.arange(count)), kind="stable")


class Order(Protocol):
    """An endless stream of sample ids; `size` positions make an epoch."""

    size: int

    def ids(self, positions: np.ndarray) -> np.ndarray: ...

    def identity(self) -> str: ...


class ShuffledOrder:
    """Every sample once an epoch. Shards are shuffled, then samples within windows of `window` shards, so few files are open at a time.

    `window=0` shuffles over all shards at once; `shuffle=False` is file order.
    """

    def __init__(
        self, counts: Sequence[int] | np.ndarray, *, seed: int = 0, window: int = 16, shuffle: bool = True, first_id: int = 0
    ) -> None:
        self.counts = np.asarray(counts, dtype=np.int64)
        self.size = int(self.counts.sum())
        if self.size == 0:
            raise ValueError("the dataset holds no sample")
        self.seed, self.shuffle, self.first_id = seed, shuffle, first_id
        self.window = len(self.counts) if window == 0 else window
        self._starts = np.cumsum(self.counts) - self.counts
        self._epoch: tuple[int, np.ndarray, np.ndarray] | None = None
        self._windows: dict[tuple[int, int], np.ndarray] = {}

    def identity(self) -> str:
        how = f"seed {self.seed} window {self.window}" if self.shuffle else "file order"
        return f"shuffled {how} from {self.first_id} counts {xxhash.xxh3_64_hexdigest(self.counts.tobytes())}"

    def ids(self, positions: np.ndarray) -> np.ndarray:
        positions = np.asarray(positions, dtype=np.int64)
        if not self.shuffle:
            return positions % self.size + self.first_id
        out = np.empty(len(positions), dtype=np.int64)
        epochs, within = np.divmod(positions, self.size)
        for epoch in np.unique(epochs).tolist():
            here = np.flatnonzero(epochs == epoch)
            window_ends = self._epoch_windows(epoch)[1]
            windows = np.searchsorted(window_ends, within[here], side="right")
            for window in np.unique(windows).tolist():
                chosen = here[windows == window]
                order = self._window_order(epoch, window)
                out[chosen] = order[within[chosen] - (int(window_ends[window]) - len(order))]
        return out + self.first_id

    def _epoch_windows(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The shard order of an epoch and where each window of it ends."""
        if self._epoch is None or self._epoch[0] != epoch:
            shards = permutation((self.seed, epoch, -1), len(self.counts))
            ends = np.cumsum(self.counts[shards])
            last = [*range(self.window - 1, len(shards) - 1, self.window), len(shards) - 1]
            self._epoch = (epoch, shards, ends[last])
        return self._epoch[1], self._epoch[2]

    def _window_order(self, epoch: int, window: int) -> np.ndarray:
        if (epoch, window) not in self._windows:
            shards = self._epoch_windows(epoch)[0][window * self.window : (window + 1) * self.window]
            members = np.concatenate([np.arange(self._starts[s], self._starts[s] + self.counts[s]) for s in shards])
            if len(self._windows) > 3:
                self._windows.pop(next(iter(self._windows)))
            self._windows[epoch, window] = members[permutation((self.seed, epoch, window), len(members))]
        return self._windows[epoch, window]


class RatioOrder:
    """All of the first `size_a` samples once an epoch, mixed with `extra` draws out of the next `size_b`, drawn anew every epoch.

    RLVR-World's gold : non-gold sampler, 100:40 being extra = 0.4 * size_a. `distinct` draws without replacement.
    """

    def __init__(self, size_a: int, size_b: int, *, extra: int, seed: int = 0, distinct: bool = False, first_id: int = 0) -> None:
        if extra and not size_b:
            raise ValueError("there is nothing to draw the extra samples from")
        if distinct and extra > size_b:
            raise ValueError(f"{extra} distinct draws out of {size_b} samples; lower extra or set distinct=False")
        self.size_a, self.size_b, self.extra, self.seed, self.distinct, self.first_id = size_a, size_b, extra, seed, distinct, first_id
        self.size = size_a + extra
        self._cached: tuple[int, np.ndarray] | None = None

    def identity(self) -> str:
        return f"ratio {self.size_a}+{self.extra} of {self.size_b} seed {self.seed} distinct {self.distinct} from {self.first_id}"

    def ids(self, positions: np.ndarray) -> np.ndarray:
        epochs, within = np.divmod(np.asarray(positions, dtype=np.int64), self.size)
        out = np.empty(len(within), dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            out[here] = self._epoch(epoch)[within[here]]
        return out + self.first_id

    def _epoch(self, epoch: int) -> np.ndarray:
        if self._cached is None or self._cached[0] != epoch:
            if self.distinct:
                drawn = permutation((self.seed, epoch, -3), self.size_b)[: self.extra]
            else:
                bits = hash_counters((self.seed, epoch, -2), np.arange(self.extra))
                # 53 bits against a size of at most 2^31: the bias is below 2^-22
                drawn = ((bits >> np.uint64(11)).astype(np.float64) * (self.size_b / 2**53)).astype(np.int64)
            whole = np.concatenate([np.arange(self.size_a), self.size_a + drawn])
            self._cached = (epoch, whole[permutation((self.seed, epoch, -1), self.size)])
        return self._cached[1]


class BlendOrder:
    """Several orders mixed by weight: after any number of positions each has had its share, to within a block's rounding.

    Positions come in blocks; a block holds a fixed number of each order's samples in an order of its own, so where any
    position lies in its order is arithmetic. Each order runs through its own epochs; `size` is one position of each sample
    of the order that lasts longest.
    """

    def __init__(self, orders: Sequence[Order], weights: Sequence[float], *, seed: int = 0) -> None:
        if len(orders) != len(weights) or not orders or min(weights) <= 0:
            raise ValueError("a blend needs one positive weight for each order")
        self.orders, self.seed = list(orders), seed
        units = np.maximum(np.round(np.asarray(weights, dtype=np.float64) / sum(weights) * 2**32), 1).astype(np.int64)
        self._edges = np.cumsum(units)
        self._total = int(self._edges[-1])
        self.block = int(max(64, -(-4 * self._total // int(units.min()))))
        self.size = int(max(np.ceil(o.size * self._total / u) for o, u in zip(orders, units, strict=True)))

    def identity(self) -> str:
        return f"blend {self._edges.tolist()} seed {self.seed} of [{'; '.join(o.identity() for o in self.orders)}]"

    def _before(self, block: int) -> np.ndarray:
        """How many samples each order has given before a block (Python integers: no overflow at any position)."""
        edges = [0, *((block * self.block * int(e)) // self._total for e in self._edges)]
        return np.diff(np.array(edges, dtype=np.int64))

    def ids(self, positions: np.ndarray) -> np.ndarray:
        blocks, within = np.divmod(np.asarray(positions, dtype=np.int64), self.block)
        out = np.empty(len(within), dtype=np.int64)
        for block in np.unique(blocks).tolist():
            before = self._before(block)
            which = np.repeat(np.arange(len(self.orders)), self._before(block + 1) - before)
            which = which[permutation((self.seed, block, -4), self.block)]
            nth = np.empty(self.block, dtype=np.int64)
            for i in range(len(self.orders)):
                nth[which == i] = before[i] + np.arange(int((which == i).sum()))
            here = np.flatnonzero(blocks == block)
            for i, order in enumerate(self.orders):
                chosen = here[which[within[here]] == i]
                if len(chosen):
                    out[chosen] = order.ids(nth[within[chosen]])
        return out
