"""Orders: which sample comes at which position of an endless stream. Pure functions of (seed, position), so resuming
costs nothing.

Random numbers come from a fixed integer hash, not from a library's generator: an order never changes with a version of
numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

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


class ShuffledOrder:
    """An endless stream of sample ids; `size` positions are an epoch, which has every sample once. Shards are shuffled,
    then samples within windows of `window` shards, so few files are open at a time, and memory does not grow with the
    data.

    `window=0` shuffles over all shards at once, as any window does that holds them all; `shuffle=False` is file order.
    """

    def __init__(
        self, counts: Sequence[int] | np.ndarray, *, seed: int = 0, window: int = 16, shuffle: bool = True
    ) -> None:
        self.counts = np.asarray(counts, dtype=np.int64)
        self.size = int(self.counts.sum())
        if self.size == 0:
            raise ValueError("the dataset holds no sample")
        self.seed, self.shuffle = seed, shuffle
        self.window = len(self.counts) if window == 0 else window
        self._starts = np.cumsum(self.counts) - self.counts
        self._epoch: tuple[int, np.ndarray, np.ndarray] | None = None
        self._windows: dict[tuple[int, int], np.ndarray] = {}

    def identity(self) -> str:
        how = f"seed {self.seed} window {self.window}" if self.shuffle else "file order"
        # "from 0": so it is in the states that are kept
        return f"shuffled {how} from 0 counts {xxhash.xxh3_64_hexdigest(self.counts.tobytes())}"

    def ids(self, positions: np.ndarray) -> np.ndarray:
        positions = np.asarray(positions, dtype=np.int64)
        if not self.shuffle:
            return positions % self.size
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
        return out

    def __getitem__(self, position: int) -> int:
        """The id at one position, for who asks one by one."""
        epoch, within = divmod(position, self.size)
        if not self.shuffle:
            return within
        window_ends = self._epoch_windows(epoch)[1]
        window = int(np.searchsorted(window_ends, within, side="right"))
        order = self._window_order(epoch, window)
        return int(order[within - (int(window_ends[window]) - len(order))])

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
            if len(self._windows) > 1:  # a step may reach into the next window
                self._windows.pop(next(iter(self._windows)))
            self._windows[epoch, window] = members[permutation((self.seed, epoch, window), len(members))]
        return self._windows[epoch, window]
