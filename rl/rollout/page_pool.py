"""The memory of the continuous batch: the pool of pages on the device, and the host's bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...core.errors import ConfigError
from ...models.paged_decode import Pool, PooledDecoder, token_bytes
from .continuous import CHUNK_TOKENS
from .copying import Copying
from .decode_step import DecodeStep
from .prefix_tree import Pages
from .sampler import SampleRequest

SPARE = 4  # rooms that are kept allow for requests growing by this factor


@dataclass
class Room:
    """A pool, its pages, and the weights whose keys and values it holds."""

    pool: Pool
    pages: Pages
    most: int | None  # pages that memory allows
    weights_version: int

    def suits(self, pages: int) -> bool:
        """Whether a new room would serve requests that want this many pages no better."""
        return self.pages.count == self.most or self.pages.count >= pages

    def enter(self, decoder: PooledDecoder, requests: Sequence[SampleRequest], weights_version: int) -> None:
        """Make it the one that `decoder` works in. Keys and values of other weights are forgotten."""
        size, held = self.pages.size, self.pages.count - 1
        needed = max(-(-r.length // size) for r in requests)
        if needed > held:
            raise ConfigError(
                f"rollouts.sampler.cache_gib: the longest request needs {needed * size} positions, "
                f"but the cache holds {held * size}; raise it"
            )
        if weights_version != self.weights_version:
            self.pages.forget_all()
            self.weights_version = weights_version
        decoder.attach(self.pool)


def make_room(
    step: DecodeStep,
    pages: int,
    cache_gib: float | None,
    keep: bool,
    weights_version: int,
    copying: Copying | None,
) -> Room:
    """Allocate room for requests that want this many pages (for longer ones too if it is kept), as far as memory
    allows.
    """
    size, decoder = step.page, step.decoder
    limit = position_limit(cache_gib, decoder, step.slots, copying)
    most = limit // size if limit is not None else None
    # proposals behind a row's last token
    count = (pages + (step.slots if copying else 0)) * (SPARE if keep else 1)
    count = max(1, count if most is None else min(count, most))
    pool = Pool(decoder.config, count, size, decoder.weights.embedding, decoder.notes)
    return Room(pool, Pages(count, size), most, weights_version)


def wanted(requests: Sequence[SampleRequest], slots: int, size: int) -> int:
    """Pages that suffice for `slots` concurrent requests; full pages of a shared prompt are stored once."""
    shared = {r.ids: (len(r.ids) - 1) // size for r in requests}
    own = sorted((-(-r.length // size) - shared[r.ids] for r in requests), reverse=True)
    return 1 + sum(own[:slots]) + sum(sorted(shared.values(), reverse=True)[:slots]) + min(slots, len(requests))


def position_limit(cache_gib: float | None, decoder: PooledDecoder, slots: int, copying: Copying | None) -> int | None:
    """The maximum number of cached positions: from the setting, else what fits most of the free device memory;
    unbounded on a CPU.
    """
    each = token_bytes(decoder.config, decoder.dtype, decoder.notes)
    if cache_gib is not None:
        return int(cache_gib * 2**30) // each
    if decoder.device.type != "cuda":
        return None
    free = (
        torch.cuda.mem_get_info(decoder.device)[0]
        + torch.cuda.memory_reserved(decoder.device)
        - torch.cuda.memory_allocated(decoder.device)
    )
    c, size = decoder.config, decoder.dtype.itemsize
    tokens = max(slots, copying.most_tokens(slots) if copying else 0)  # of one pass
    work = tokens * c.vocab * size + max(tokens, CHUNK_TOKENS) * (4 * c.ffn + 8 * c.hidden) * size
    return max(0, int(0.9 * free) - 2 * work) // each
