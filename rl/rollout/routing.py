"""Chooses a server for each request: the one that has cached most of its prompt, else the least loaded one.

The requests of one call are assigned before any is sent, so that equal calls are assigned equally.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

import xxhash

BLOCK = 64  # tokens
KEPT = 1 << 18  # prompt prefixes that are remembered
BUSY, FEW = 1.25, 8  # a server may exceed the mean load by this factor, and by this many requests, for its cache's sake


class Routing:
    """The recent prompts of each server, and its load."""

    def __init__(self, servers: int) -> None:
        self.busy = [0] * servers
        self.known: OrderedDict[int, int] = OrderedDict()
        self.lock = Lock()

    def take(self, ids: Sequence[int]) -> int:
        """Choose the server for a prompt; it counts as loaded until `done`."""
        places = beginnings(ids)
        with self.lock:
            # a match of less than half the prompt, such as a common preamble, does not justify crowding one server
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
        """New weights: cached prompts are useless."""
        with self.lock:
            self.known.clear()


def beginnings(ids: Sequence[int]) -> list[int]:
    """Keys of a prompt's prefixes of whole blocks, longest first, starting with the whole prompt."""
    mixed, keys = xxhash.xxh3_64(), []
    for start in range(0, len(ids), BLOCK):
        mixed.update(array("q", ids[start : start + BLOCK]).tobytes())
        keys.append(mixed.intdigest())
    return keys[::-1]
