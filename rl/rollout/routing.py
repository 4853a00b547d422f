"""Which of several servers a request goes to: the one that has read most of its prompt, else the one with least to do.

A client's requests of one call are dealt out before any is sent, so that equal calls are dealt alike.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

import xxhash

BLOCK = 64  # tokens
KEPT = 1 << 18  # beginnings of prompts that are remembered
BUSY, FEW = 1.25, 8  # a server is not kept to beyond so many times the mean, and so many requests more


class Routing:
    """What each server has read of late, and what it has to do."""

    def __init__(self, servers: int) -> None:
        self.busy = [0] * servers
        self.known: OrderedDict[int, int] = OrderedDict()
        self.lock = Lock()

    def take(self, ids: Sequence[int]) -> int:
        """The server of a prompt, which has one request more until `done`."""
        places = beginnings(ids)
        with self.lock:
            # less than half of a prompt, such as what all tasks begin with, is no reason to crowd one server
            known = (self.known.get(key) for key in places[: len(places) // 2 + 1])
            server = next((found for found in known if found is not None), None)
            count = len(self.busy)
            if server is None or self.busy[server] > BUSY * sum(self.busy) / count + FEW:
                server = min(range(count), key=lambda i: (self.busy[i], (i - places[0]) % count))
            self.busy[server] += 1
            for key in places:
                self.known[key] = server
                self.known.move_to_end(key)
            while len(self.known) > KEPT:
                self.known.popitem(last=False)
        return server

    def done(self, server: int) -> None:
        with self.lock:
            self.busy[server] -= 1

    def forget(self) -> None:
        """New weights: nothing that was read is of use any more."""
        with self.lock:
            self.known.clear()


def beginnings(ids: Sequence[int]) -> list[int]:
    """Keys of a prompt and of its beginnings of whole blocks, the longest first."""
    mixed, keys = xxhash.xxh3_64(), []
    for start in range(0, len(ids), BLOCK):
        mixed.update(array("q", ids[start : start + BLOCK]).tobytes())
        keys.append(mixed.intdigest())
    return keys[::-1]
