"""Continuous batching: requests enter free rows as others leave, prompts are stored once a group, forced tokens go in by chunks.

The host knows where every row stands without asking the device, because each step gives every row exactly one token; only which token
it was, and so whether it was a stop, has to be read. Where no request can stop early the host never waits.
Shape suffixes: B rows, W steps of a window, T tokens, N sequences, X tiles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...core.errors import ConfigError, NumericsError
from ...core.rng import fold, signed
from ...kernels.decode_cache import Rows, Tiles
from ...models.pooled import Pool, PooledDecoder, token_bytes
from .sampler import Sample, SampleRequest, SamplingParams, interleave
from .step import FIELDS, WINDOW, DecodeStep, bucket_of, to_device

CHUNK_TOKENS = 8192  # tokens of one pass over given tokens
ENTRY_TOKENS = 32768  # given tokens read between two windows while others decode
SHARED_LEAST = 256  # shorter prefixes come out of the GPU's cache as fast as by a kernel of their own
NEVER = np.iinfo(np.int64).max


@dataclass
class Prefix:
    """A prompt without its last token: in the pool, or to be put there."""

    ids: tuple[int, ...]
    waiting: int  # requests that still need it
    start: int = -1


@dataclass
class Row:
    """A request in flight."""

    index: int
    request: SampleRequest
    prefix: Prefix
    own_start: int
    own_cap: int
    key: int  # signed
    spans: int = 0  # forced spans already fed

    @property
    def next_forced(self) -> int:
        forced = self.request.forced
        return forced[self.spans][0] if self.spans < len(forced) else NEVER


@dataclass(frozen=True)
class Window:
    """What a run of steps sampled, on its way to the host."""

    tokens_WB: torch.Tensor
    logprobs_WB: torch.Tensor
    ready: torch.cuda.Event | None
    rows: list[Row]
    count_B: np.ndarray  # tokens each row had when it began


def pool_tokens(requests: Sequence[SampleRequest], slots: int, limit: int | None) -> int:
    """Positions the pool needs for `slots` requests at a time, at most `limit`."""
    own = sorted((r.length - len(r.ids) for r in requests), reverse=True)
    prefixes = sorted((len(ids) - 1 for ids in {r.ids for r in requests}), reverse=True)
    wanted = 1 + sum(own[:slots]) + sum(prefixes[:slots])
    least = 1 + max(r.length - 1 for r in requests)
    if limit is not None and least > limit:
        raise ConfigError(f"rollouts.sampler.cache_gib: the longest request needs {least} positions, but the cache holds {limit}; raise it")
    return wanted if limit is None else min(wanted, limit)


class ContinuousBatch:
    """All requests of one call, driven to their ends on one `DecodeStep`. `params` is given where sampling needs the slow path."""

    def __init__(self, step: DecodeStep, requests: Sequence[SampleRequest], params: SamplingParams | None, limit: int | None) -> None:
        self.step, self.requests, self.params = step, requests, params
        self.decoder: PooledDecoder = step.decoder
        self.pool = Pool(self.decoder.config, pool_tokens(requests, step.slots, limit), self.decoder.weights.embedding)
        self.decoder.attach(self.pool)
        self.pool.allocate(1)  # where idle rows write
        order: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            order.setdefault(request.ids, []).append(index)
        self.prefixes = {ids: Prefix(ids[:-1], len(members)) for ids, members in order.items()}
        self.waiting = deque(index for members in order.values() for index in members)
        self.active: list[Row] = []
        self.count_B = self.length_B = self.forced_B = np.zeros(0, np.int64)
        width = max(r.params.max_new_tokens for r in requests)
        self.ids = np.zeros((len(requests), width), np.int64)
        self.logprobs = np.zeros((len(requests), width), np.float32)
        self.ends = np.array([r.params.max_new_tokens for r in requests])
        self.stopped = np.zeros(len(requests), bool)
        self.pending: deque[Window] = deque()
        step.idle()
        if params is not None and params.repetition_penalty != 1.0:
            step.seen_BV = torch.zeros(len(step.temperature_B), self.decoder.config.vocab, dtype=torch.bool, device=self.decoder.device)

    def run(self, version: int) -> list[Sample]:
        """Every request's continuation, in the order of the requests."""
        try:
            while self.active or self.waiting:
                self._compose()
                self._window()
                while self.pending and (len(self.pending) > 4 or any(row.request.params.stop_ids for row in self.active)):
                    self._read(self.pending.popleft())
            while self.pending:
                self._read(self.pending.popleft())
        finally:
            self.step.seen_BV = None
        kept = np.arange(self.ids.shape[1]) < self.ends[:, None]
        if not np.isfinite(self.logprobs[kept]).all():
            raise NumericsError("the sampler met a log-prob that is not finite; the weights hold NaN or infinity")
        rows = zip(self.requests, self.ids.tolist(), self.logprobs.tolist(), self.ends.tolist(), self.stopped.tolist(), strict=True)
        return [interleave(i[:n], p[:n], r, "stop" if s else "length", version) for r, i, p, n, s in rows]

    # Who is in flight

    def _compose(self) -> None:
        """Let finished rows leave and waiting requests enter; tell the device when anything changed."""
        over_B = self.count_B >= np.array([self.ends[row.index] for row in self.active], np.int64)
        old = [i for i, over in enumerate(over_B) if not over]
        for row, over in zip(self.active, over_B, strict=True):
            if over:
                self.pool.free(row.own_start, row.own_cap)
                self._leave(row.prefix)
        kept = [self.active[i] for i in old]
        entering, fresh = self._enter(len(kept))
        if not kept and not entering and self.waiting:  # only prefixes lie in the way: begin with an empty pool
            self._empty_pool()
            entering, fresh = self._enter(0)
        if not entering and len(kept) == len(self.active):
            return
        self._read_prompts(fresh)
        self.count_B = np.concatenate([self.count_B[old], np.zeros(len(entering), np.int64)])
        self.length_B = np.concatenate([self.length_B[old], np.zeros(len(entering), np.int64)])
        self.active = kept + entering
        self.forced_B = np.array([row.next_forced for row in self.active], np.int64)
        if self.active:
            self._upload(old)

    def _leave(self, prefix: Prefix) -> None:
        prefix.waiting -= 1
        if not prefix.waiting:
            self.pool.free(prefix.start, len(prefix.ids))

    def _empty_pool(self) -> None:
        for prefix in self.prefixes.values():
            prefix.start = -1
        self.pool.reset()
        self.pool.allocate(1)

    def _enter(self, taken: int) -> tuple[list[Row], list[Prefix]]:
        """Requests that get a row now, and the prompts to be read for them."""
        entering: list[Row] = []
        fresh: list[Prefix] = []
        tokens = 0
        while self.waiting and taken + len(entering) < self.step.slots:
            index = self.waiting[0]
            request = self.requests[index]
            prefix = self.prefixes[request.ids]
            new = prefix.start < 0
            if new:
                if taken and tokens + len(prefix.ids) > ENTRY_TOKENS:
                    break
                start = self.pool.allocate(len(prefix.ids)) if prefix.ids else 0
                if start is None:
                    break
                prefix.start = start
            room = request.length - len(request.ids)
            own = self.pool.allocate(room)
            if own is None:
                if new:
                    self.pool.free(prefix.start, len(prefix.ids))
                    prefix.start = -1
                break
            if new:
                fresh.append(prefix)
                tokens += len(prefix.ids)
            self.waiting.popleft()
            entering.append(Row(index, request, prefix, own, room, signed(fold(*request.key))))
        return entering, fresh

    def _upload(self, old: list[int]) -> None:
        """Write the state of all rows; the next token of an old row is known to the device alone."""
        step, unit, device = self.step, self.pool.unit, self.decoder.device
        rows = bucket_of(len(self.active), step.slots)
        host = np.zeros((len(FIELDS), rows), np.int64)
        line = {name: host[i] for i, name in enumerate(FIELDS)}
        line["own_cap"][:], line["high"][:] = 1, self.decoder.config.vocab
        warm = np.ones(rows, np.float32)
        together: dict[int, list[int]] = {}
        n = len(self.active)
        line["own_len"][:n], line["count"][:n] = self.length_B, self.count_B
        names = ("key", "prefix_start", "prefix_len", "own_start", "own_cap")
        fixed = [(row.key, row.prefix.start * unit, len(row.prefix.ids), row.own_start * unit, row.own_cap) for row in self.active]
        for name, column in zip(names, np.array(fixed, np.int64).T, strict=True):
            line[name][:n] = column
        for i, row in enumerate(self.active):
            params = row.request.params
            warm[i] = params.temperature
            if params.allowed is not None:
                line["low"][i], line["high"][i] = params.allowed
            if i >= len(old):
                line["token"][i] = row.request.ids[-1]
            together.setdefault(id(row.prefix), []).append(i)
        tiles, size = [], step.tiles_BR.shape[1]
        for members in together.values():
            length = len(self.active[members[0]].prefix.ids)
            for at in range(0, len(members), size) if length >= SHARED_LEAST else ():
                part = members[at : at + size]
                if len(part) > 1:
                    tiles.append(part + [-1] * (size - len(part)))
                    line["done"][part] = length
        order = np.zeros(rows, np.int64)
        order[: len(old)] = old
        moved, order_B = to_device(host, device), to_device(order, device)
        token_B = step.line("token")[order_B]
        if step.seen_BV is not None:
            self._upload_seen(old, order_B)
        step.numbers[:, :rows] = moved
        step.line("token", len(old)).copy_(token_B[: len(old)])
        step.temperature_B[:rows] = to_device(warm, device)
        step.tiles_BR.fill_(-1)
        step.shares = bool(tiles)
        if tiles:
            step.tiles_BR[: len(tiles)] = to_device(np.array(tiles, np.int32), device)

    def _upload_seen(self, old: list[int], order_B: torch.Tensor) -> None:
        seen_BV = self.step.seen_BV
        assert seen_BV is not None
        seen_BV[: len(order_B)] = seen_BV[order_B]
        for i in range(len(old), len(self.active)):
            seen_BV[i] = False
            seen_BV[i, list(self.active[i].request.ids)] = True

    # What the device does

    def _window(self) -> None:
        """Some steps of all rows, forced spans between them, and the copy of what was sampled."""
        if not self.active:
            return
        step = self.step
        rows = bucket_of(len(self.active), step.slots)
        left_B = np.array([self.ends[row.index] for row in self.active]) - self.count_B
        steps = int(min(WINDOW, left_B.max()))
        replay = step.replay(rows, self.params)
        began_B = self.count_B.copy()
        caps_B = np.array([row.own_cap for row in self.active])
        step.tick_1.zero_()
        for _ in range(steps):
            due = np.flatnonzero(self.forced_B == self.count_B)
            if len(due):
                self._force(due)
            replay()
            self.count_B += 1
            self.length_B = np.minimum(self.length_B + 1, caps_B - 1)
        n = len(self.active)
        tokens, logprobs = step.tokens_WB[:steps, :n], step.logprobs_WB[:steps, :n]
        ready = None
        if tokens.is_cuda:
            tokens, logprobs = (
                torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in (tokens, logprobs)
            )
            ready = torch.cuda.Event()
            ready.record()
        else:
            tokens, logprobs = tokens.clone(), logprobs.clone()
        self.pending.append(Window(tokens, logprobs, ready, list(self.active), began_B))

    def _force(self, due: np.ndarray) -> None:
        """Feed a forced span to these rows: all but its last token now, behind the one just sampled; the last is the next step's input."""
        step, device = self.step, self.decoder.device
        spans = [self.active[i].request.forced[self.active[i].spans][1] for i in due]
        at_N = to_device(due.astype(np.int64), device)
        if step.seen_BV is not None:
            for i, span in zip(due, spans, strict=True):
                step.seen_BV[i, list(span)] = True
        lengths = [len(span) for span in spans]
        given = [(0, *span[:-1]) for span in spans]
        names = ("prefix_start", "prefix_len", "own_start", "own_cap", "own_len")
        lines = {name: step.line(name)[at_N] for name in (*names, "token")}
        for low, high in _parts(lengths):
            rows = Rows(*(lines[name][low:high] for name in names))
            ids_T, tiles = self._tiles(given[low:high])
            first_N = np.cumsum([0, *lengths[low : high - 1]])
            ids_T[to_device(first_N, device)] = lines["token"][low:high]
            self.decoder.extend(ids_T, rows, tiles)
        step.line("token").index_copy_(0, at_N, to_device(np.array([span[-1] for span in spans]), device))
        step.line("own_len").index_add_(0, at_N, to_device(np.array(lengths), device))
        self.length_B[due] += np.array(lengths)
        for i in due:
            self.active[i].spans += 1
            self.forced_B[i] = self.active[i].next_forced

    def _read_prompts(self, fresh: list[Prefix]) -> None:
        """Store new prompts, in chunks of bounded size; a long prompt goes in several."""
        pieces = [(p, at, min(CHUNK_TOKENS, len(p.ids) - at)) for p in fresh for at in range(0, len(p.ids), CHUNK_TOKENS)]
        unit, device = self.pool.unit, self.decoder.device
        for low, high in _parts([length for _, _, length in pieces]):
            part = pieces[low:high]
            numbers = np.array([(0, 0, p.start * unit, len(p.ids), at) for p, at, _ in part], np.int64).T
            ids_T, tiles = self._tiles([p.ids[at : at + length] for p, at, length in part])
            self.decoder.extend(ids_T, Rows(*to_device(numbers, device).unbind()), tiles)

    def _tiles(self, given: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, Tiles]:
        """Token ids end to end, and how attention goes over them."""
        most, device = self.step.tiles_BR.shape[1], self.decoder.device
        lengths = np.array([len(ids) for ids in given])
        first_N = np.cumsum(lengths) - lengths
        counts = -(-lengths // most)
        row_X = np.repeat(np.arange(len(given)), counts)
        offset_X = (np.arange(len(row_X)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
        tile_X4 = np.stack([row_X, first_N[row_X] + offset_X, offset_X, np.minimum(most, lengths[row_X] - offset_X)], 1).astype(np.int32)
        row_T = np.repeat(np.arange(len(given)), lengths)
        offset_T = np.arange(len(row_T)) - first_N[row_T]
        ids_T = np.concatenate([np.asarray(ids, np.int64) for ids in given])
        moved = [to_device(x, device) for x in (tile_X4, row_T, offset_T, ids_T)]
        return moved[3], Tiles(moved[0], moved[1], moved[2], most)

    # What comes back

    def _read(self, window: Window) -> None:
        """Put a window's tokens where they belong; a stop ends its row."""
        if window.ready is not None:
            window.ready.synchronize()
        tokens_BW, logprobs_BW = window.tokens_WB.numpy().T, window.logprobs_WB.numpy().T
        index_B = np.array([row.index for row in window.rows])
        place_BW = window.count_B[:, None] + np.arange(tokens_BW.shape[1])
        ok_BW = place_BW < self.ends[index_B][:, None]
        stops: dict[tuple[int, ...], list[int]] = {}
        for i, row in enumerate(window.rows):
            if row.request.params.stop_ids:
                stops.setdefault(row.request.params.stop_ids, []).append(i)
        for ids, members in stops.items():
            hit_MW = np.isin(tokens_BW[members], ids) & ok_BW[members]
            ended = np.flatnonzero(hit_MW.any(1))
            at = np.array(members)[ended]
            self.stopped[index_B[at]] = True
            self.ends[index_B[at]] = place_BW[at, hit_MW[ended].argmax(1)] + 1
        ok_BW = place_BW < self.ends[index_B][:, None]
        where = np.broadcast_to(index_B[:, None], place_BW.shape)[ok_BW], place_BW[ok_BW]
        self.ids[where], self.logprobs[where] = tokens_BW[ok_BW], logprobs_BW[ok_BW]


def _parts(lengths: list[int]) -> list[tuple[int, int]]:
    """Runs of neighbours with at most CHUNK_TOKENS tokens each."""
    parts, low, total = [], 0, 0
    for i, length in enumerate(lengths):
        if i > low and total + length > CHUNK_TOKENS:
            parts.append((low, i))
            low, total = i, 0
        total += length
    return [*parts, (low, len(lengths))] if lengths else []


def position_limit(cache_gib: float | None, decoder: PooledDecoder, slots: int) -> int | None:
    """How many positions may be held: by the setting, else what fits into most of the free device memory; on CPU without bound."""
    each = token_bytes(decoder.config, decoder.dtype)
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
    work = slots * c.vocab * size + max(slots, CHUNK_TOKENS) * (4 * c.ffn + 8 * c.hidden) * size
    return max(0, int(0.9 * free) - 2 * work) // each
