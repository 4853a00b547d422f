"""Continuous batching on pages: requests enter as others leave and as pages are free, given tokens go in by chunks.

The host knows where every row stands without asking the device, because each step gives every row exactly one token;
only which token it was, and so whether it was a stop, has to be read. Where no request can stop early the host never
waits. Where rows copy (copying.py), a pass gives each of them one token or several, and the host waits at the end of a
window to learn how many. Rows get pages as they grow; when there are none left, the youngest request gives up its own
and is begun again later, with the tokens it had. A stream of requests is taken from between two windows, and new
weights begin all of them again in this way: a token is sampled by one version, and so is all that it attends to.

Shape suffixes: B rows, W steps of a window, T tokens, N sequences, X tiles, P pages of a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...core.rng import fold, signed
from ...data.trajectory import Routing
from ...kernels.decode_cache import Rows, Tiles
from ...models.paged_decode import Pool, PooledDecoder
from .answers import Answers, Window
from .copying import Copying
from .decode_step import COPIES, FIELDS, WINDOW, DecodeStep, bucket_of, to_device
from .prefix_tree import Pages
from .sampler import Sample, SampleRequest, SamplingParams
from .stream import Stream, Ticket

CHUNK_TOKENS = 8192  # tokens of one pass over given tokens
ENTRY_TOKENS = 32768  # given tokens stored between two windows while others decode
SHARED_LEAST = 256  # shorter prefixes come out of the GPU's cache as fast as by a kernel of their own
NEVER = np.iinfo(np.int64).max


@dataclass(eq=False)
class Row:
    """A request in flight."""

    index: int
    request: SampleRequest
    order: int  # of entering
    given: tuple[int, ...]  # tokens to store before it decodes
    token: int  # the one to feed first
    key: int  # signed
    count: int  # tokens it had sampled when it entered
    spans: int  # forced spans already fed
    pages: list[int]
    found: int  # the first of them, which others had stored
    copy: tuple[int, int] | None  # a page that holds its next tokens, to be copied, and how many
    stored: int  # of `given`
    phase: int  # it is stored after the rows of lower phases

    @property
    def next_forced(self) -> int:
        forced = self.request.forced
        return forced[self.spans][0] if self.spans < len(forced) else NEVER

    def room(self, length: int, count: int, reach: int) -> int:
        """Positions it needs for a window of `reach` more when it holds `length` and has sampled `count`."""
        due = sum(len(ids) for at, ids in self.request.forced[self.spans :] if at < count + WINDOW)
        return length + reach + due


@dataclass
class Use:
    """What became of the pages, over all calls since it was looked at."""

    given: int = 0  # tokens that had to be in the cache before decoding
    stored: int = 0  # of these, computed
    preempted: int = 0  # requests begun again for want of pages
    most: int = 0  # pages in use at once
    waste: float = 0.0  # the share of their positions that held nothing, then
    made: int = 0  # tokens sampled, with those behind a stop
    copied: int = 0  # of these, proposed before
    passes: int = 0  # passes that rows took part in to make them


class ContinuousBatch:
    """All requests of one call, driven to their ends on one `DecodeStep`. `params` is given where sampling needs the
    slow path, `copying` where rows may propose tokens.

    With `keep` the pages of finished requests stay known to `pages`, for requests that go on from them. `use` is added
    to. `weights_version` is of the weights that `pages` were computed with.
    """

    def __init__(
        self,
        step: DecodeStep,
        pool: Pool,
        pages: Pages,
        requests: Sequence[SampleRequest],
        params: SamplingParams | None,
        keep: bool,
        use: Use,
        weights_version: int,
        copying: Copying | None = None,
    ) -> None:
        self.step, self.pool, self.pages, self.answers = step, pool, pages, Answers(requests)
        self.params, self.keep, self.use = params, keep, use
        self.decoder: PooledDecoder = step.decoder
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(request.ids, []).append(index)
        self.waiting = deque(index for members in groups.values() for index in members)
        self.filling: list[Row] = []
        self.phase_of: dict[int, int] = {}  # of pages that are not stored yet
        self.active: list[Row] = []
        self.dropped: set[int] = set()  # places in `active` that are about to leave
        self.leaving: list[Row] = []  # over, but not all of their tokens have been read
        self.count_B = self.length_B = self.forced_B = self.cap_B = np.zeros(0, np.int64)
        self.table = np.zeros(step.table_BP.shape, np.int32)
        self.restart: dict[int, int] = {}  # tokens that requests had sampled when they were sent back
        self.entered = 0
        self.longest = longest = max(r.length for r in requests)
        # a penalty depends on the tokens before; and what is proposed last lies behind the last token
        if copying and (params is not None or longest + copying.most > (pages.count - 1) * pages.size):
            copying = None
        self.copying = copying
        self.beyond = copying.most if copying else 0  # positions behind a request's last that it may write to
        self.texts: dict[int, np.ndarray] = {}  # all tokens of the rows that copied last
        self.on_device = False  # whether the device has them
        if copying:
            step.make_text(longest)
        self.pending: deque[tuple[Window, list[Row]]] = deque()
        self.routes: dict[int, tuple[torch.Tensor, torch.cuda.Event | None]] = {}  # experts of requests that are over
        self.version, self.weights_version = 0, weights_version
        self.tickets: dict[int, Ticket] = {}  # of a stream: the requests that have no answer yet
        step.idle()
        if params is not None and params.repetition_penalty != 1.0:
            step.seen_BV = torch.zeros(
                len(step.temperature_B), self.decoder.config.vocab, dtype=torch.bool, device=self.decoder.device
            )

    def run(self, version: int) -> list[Sample]:
        """Every request's continuation, in the order of the requests."""
        self.version = version
        try:
            while self.active or self.filling or self.waiting:
                self._advance()
                while self.pending and (
                    len(self.pending) > 4 or any(row.request.params.stop_ids for row in self.active)
                ):
                    self._read(*self.pending.popleft())
            self._settle()
        finally:
            self.step.seen_BV = None
        return [self._sample(index) for index in range(len(self.answers.requests))]

    def serve(
        self,
        tickets: Sequence[Ticket],
        stream: Stream,
        versions: Callable[[], tuple[int, int]],
        suits: Callable[[SampleRequest], bool],
    ) -> list[Ticket]:
        """Answer the tickets that it was made for, and those that the stream gives meanwhile, until none is left.
        Returns those that came and do not suit it: once there are some, no others are taken. `versions` are the one
        that samples are marked with, and the one of the weights.
        """
        self.tickets = dict(enumerate(tickets))
        self.answers.mark_versions()
        left: list[Ticket] = []
        try:
            while self.tickets:
                with stream.turn():
                    self._advance(versions())
                    self._settle()
                self._hand_over(stream)
                fresh = [] if left else stream.take(wait=False)
                if fresh is None:
                    break
                for ticket in fresh:
                    if suits(ticket.request):
                        self._take_in(ticket)
                    else:
                        left.append(ticket)
            self.dropped = set()
            self._retire()  # the last ones give their pages back
        finally:
            self.step.seen_BV = None
        return left

    def _advance(self, versions: tuple[int, int] | None = None) -> None:
        """Rows leave and enter, then all decode for a window. With other weights those in flight begin again."""
        if self._ahead():
            self._settle()  # proposals come from what is known
        self._compose(versions)
        if self._ahead() and not self.pending:
            self._copy_window(self._ahead())
        else:
            self._window()

    def _hand_over(self, stream: Stream) -> None:
        """Answer the requests whose tokens have all been read."""
        over = [index for index in self.tickets if self.answers.is_read(index)]
        if over:
            stream.give([(self.tickets.pop(index), self._sample(index)) for index in over])

    def _take_in(self, ticket: Ticket) -> None:
        """A request that joins those in flight."""
        index = self.answers.add(ticket.request)
        self.tickets[index] = ticket
        self.waiting.append(index)

    def _sample(self, index: int) -> Sample:
        """A request's continuation, when it is over."""
        sample = self.answers.sample(index, self.version)
        if not self.answers.ends[index]:
            return sample
        length = len(self.answers.requests[index].ids) + len(sample.ids)
        return replace(sample, experts=self._routing(index, length))

    def _routing(self, index: int, length: int) -> Routing | None:
        """The experts that were chosen for a request's tokens, where they are noted."""
        if index not in self.routes:
            return None
        pages, ready = self.routes.pop(index)
        if ready is not None:
            ready.synchronize()
        config = self.decoder.config
        chosen = pages.view(-1, config.layers, config.experts_per_token)[:length].numpy().copy()
        chosen[-1] = -1  # never fed, or only by chance
        return Routing.of(chosen)

    def _ahead(self) -> int:
        """Proposals a row in the next window; 0 where it is a plain one."""
        return self.copying.ahead(bucket_of(len(self.active), self.step.slots)) if self.copying else 0

    # Who is in flight

    def _compose(self, versions: tuple[int, int] | None = None) -> None:
        """Let finished rows leave, give pages to those that go on, let others enter; tell the device what changed."""
        self.dropped, before = set(), self.use.preempted
        self._retire()
        if versions is not None:
            self.version, weights_version = versions
            if weights_version != self.weights_version:
                self._renew(weights_version)
        grown = self._grow()
        if self.use.preempted == before:
            self._enter()
        ready = self._fill()
        if self.dropped or ready:
            self._arrange(ready)
        elif grown:
            self._upload_table()
        in_use = self.pages.count - 1 - self.pages.free
        if in_use > self.use.most:
            self.use.most = in_use
            held = sum(len(row.pages) for row in self.active) * self.pages.size - int(self.length_B.sum())
            self.use.waste = held / (in_use * self.pages.size)

    def _retire(self) -> None:
        """Rows that have all their tokens leave."""
        for i, row in enumerate(self.active):
            if i not in self.dropped and self.count_B[i] >= self.answers.ends[row.index]:
                self.dropped.add(i)
                self.leaving.append(row)
        self._let_go()

    def _let_go(self) -> None:
        """Give back the pages of rows that are over; where they are kept or noted on, once it is known what they
        hold.
        """
        left = []
        for row in self.leaving:
            if (self.keep or self.decoder.notes) and not self.answers.is_read(row.index):
                left.append(row)
                continue
            if self.keep:
                whole = self.answers.sequence(row.index, int(self.answers.ends[row.index]))
                self.pages.learn(row.pages, whole[:-1])
            self.pages.release(row.pages)
            if self.answers.versions is not None:  # a stream has answered it, and no window of it is unread
                self.texts.pop(row.index, None)
                self.restart.pop(row.index, None)
                self.answers.spare.append(row.index)
        self.leaving = left

    def _grow(self) -> bool:
        """Pages for the next window of every row; the oldest rows come first."""
        reach = self._reach()
        room_B = self.length_B + reach
        for i in np.flatnonzero(self.forced_B < self.count_B + WINDOW):
            room_B[i] = self.active[i].room(int(self.length_B[i]), int(self.count_B[i]), reach)
        total_B = np.array([row.request.length + self.beyond for row in self.active], np.int64)
        room_B = np.minimum(room_B, total_B)
        short = sorted(
            (i for i in np.flatnonzero(room_B > self.cap_B).tolist() if i not in self.dropped),
            key=lambda i: self.active[i].order,
        )
        for i in short:
            row = self.active[i]
            while i not in self.dropped and len(row.pages) * self.pages.size < room_B[i]:
                page = self._page()
                if i in self.dropped:
                    self.pages.release([page])
                else:
                    self.table[i, len(row.pages)] = page
                    row.pages.append(page)
            self.cap_B[i] = min(len(row.pages) * self.pages.size, total_B[i])
        return bool(short)

    def _reach(self) -> int:
        """Positions a row should have for its next window: what a plain one needs, with room for proposals; where
        there is plenty, all that copies may fill.
        """
        least = WINDOW + 1 + self.beyond
        most = (COPIES + 1) * (self._ahead() + 1)
        if most <= least:
            return least
        return most if self.pages.free > len(self.active) * (1 + most // self.pages.size) else least

    def _page(self) -> int:
        """A page of the pool. Where none is free, requests that have ended give theirs, else the youngest one does."""
        while (page := self.pages.take()) is None:
            if self.pending:
                self._settle()
                self._retire()
            else:
                self._preempt()
        return page

    def _preempt(self) -> None:
        """Send the youngest request back to wait. All that it sampled has been read."""
        place = {row: i for i, row in enumerate(self.active) if i not in self.dropped}
        row = max([*place, *self.filling], key=lambda row: row.order)
        if row in place:
            self.dropped.add(place[row])
            self.restart[row.index] = count = int(self.count_B[place[row]])
            # what is still there then is not computed again
            self.pages.learn(row.pages, self.answers.sequence(row.index, count)[:-1])
        else:
            self.filling.remove(row)
            for number, page in enumerate(row.pages[row.found :], row.found):
                self.phase_of.pop(page, None)
                if number >= row.stored // self.pages.size:  # nobody older counts on what it was to hold
                    self.pages.forget(page)
            if row.copy:
                self.pages.release([row.copy[0]])
        self.pages.release(row.pages)
        self.waiting.appendleft(row.index)
        self.use.preempted += 1

    def _renew(self, weights_version: int) -> None:
        """Send all requests back, to go on with other weights. Nothing that was computed before is used."""
        before = self.use.preempted
        while len(self.active) > len(self.dropped) or self.filling:
            self._preempt()
        self.pages.forget_all()
        self.use.preempted, self.weights_version = before, weights_version

    def _enter(self) -> None:
        """Requests that get pages now; their given tokens are still to be stored."""
        while self.waiting:
            flying = len(self.active) - len(self.dropped) + len(self.filling)
            if flying >= self.step.slots:
                break
            row = self._begin(self.waiting[0], flying)
            if row is None and not flying and self.pending:
                self._settle()
                continue
            if row is None:
                assert flying, "the pool holds the longest request"
                break
            self.waiting.popleft()
            self.filling.append(row)

    def _begin(self, index: int, flying: int) -> Row | None:
        """A request with pages for its given tokens and its first window, if one more page for every row in flight
        is left over.
        """
        request, count, size = self.answers.requests[index], self.restart.get(index, 0), self.pages.size
        ids = self.answers.sequence(index, count)
        pages, copy = self.pages.find(ids[:-1])
        spans = sum(at < count for at, _ in request.forced)
        key, found = signed(fold(*request.key)), len(pages)
        row = Row(
            index, request, self.entered, ids[:-1], ids[-1], key, count, spans, pages, found, copy, found * size, 0
        )
        room = min(row.room(len(row.given), count, WINDOW + 1 + self.beyond), request.length + self.beyond)
        missing = -(-room // size) - found
        if copy and self.pages.free < missing + flying:  # the page to copy from may be one of those it needs
            self.pages.release([copy[0]])
            row.copy = copy = None
        if self.pages.free < missing + flying:
            self.pages.release(pages)
            return None
        self.entered += 1
        row.phase = max((self.phase_of.get(page, 0) for page in pages), default=0)
        if copy and copy[0] in self.phase_of:
            row.phase = max(row.phase, self.phase_of[copy[0]] + 1)
        for _ in range(missing):
            pages.append(page := self._page())
            self.phase_of[page] = row.phase
        self.pages.learn(pages, row.given)
        self.use.given += len(row.given)
        return row

    def _fill(self) -> list[Row]:
        """Store given tokens, as many as may go between two windows; returns the rows that are ready to decode."""
        budget = ENTRY_TOKENS if len(self.active) > len(self.dropped) else NEVER
        self.filling.sort(key=lambda row: (row.phase, row.order))
        ready: list[Row] = []
        while self.filling and budget > 0:
            now = [row for row in self.filling if row.phase == self.filling[0].phase]
            self._copy([row for row in now if row.copy])
            pieces: list[tuple[Row, int, int]] = []
            done = 0
            for row in now:
                tokens = min(len(row.given) - row.stored, budget)
                pieces += [
                    (row, row.stored + at, min(CHUNK_TOKENS, tokens - at)) for at in range(0, tokens, CHUNK_TOKENS)
                ]
                row.stored += tokens
                budget -= tokens
                if row.stored < len(row.given):
                    break
                done += 1
                for page in row.pages:
                    self.phase_of.pop(page, None)
            self._store(pieces)
            ready += self.filling[:done]
            del self.filling[:done]
        return ready

    def _arrange(self, ready: list[Row]) -> None:
        """Close the gaps that rows left and add the new ones."""
        old = [i for i in range(len(self.active)) if i not in self.dropped]
        n, size = len(old) + len(ready), self.pages.size
        self.active, self.on_device = [*(self.active[i] for i in old), *ready], False
        self.count_B = np.concatenate([self.count_B[old], np.array([row.count for row in ready], np.int64)])
        self.length_B = np.concatenate([self.length_B[old], np.array([len(row.given) for row in ready], np.int64)])
        total_B = [row.request.length + self.beyond for row in self.active]
        self.cap_B = np.array(
            [min(len(row.pages) * size, total) for row, total in zip(self.active, total_B, strict=True)], np.int64
        )
        self.forced_B = np.array([row.next_forced for row in self.active], np.int64)
        width, rows = max((len(row.pages) for row in self.active), default=1), bucket_of(n, self.step.slots)
        self.table[: len(old), :width] = self.table[old, :width]
        self.table[len(old) : rows] = 0
        for i in range(len(old), n):
            self.table[i, : len(self.active[i].pages)] = self.active[i].pages
        if self.active:
            self._upload(old)

    def _upload_table(self) -> None:
        """Tell the device which pages the rows have, and how far they reach."""
        n, width = bucket_of(len(self.active), self.step.slots), max(len(row.pages) for row in self.active)
        self.step.table_BP[:n, :width] = to_device(self.table[:n, :width], self.decoder.device)
        self.step.line("cap", len(self.active)).copy_(to_device(self.cap_B, self.decoder.device))

    def _upload(self, old: list[int]) -> None:
        """Write the state of all rows; the next token of an old row is known to the device alone."""
        step, device = self.step, self.decoder.device
        rows = bucket_of(len(self.active), step.slots)
        host = np.zeros((len(FIELDS), rows), np.int64)
        line = {name: host[i] for i, name in enumerate(FIELDS)}
        line["cap"][:], line["high"][:] = 1, self.decoder.config.vocab
        warm, top_p = np.ones((2, rows), np.float32)
        together: dict[tuple[int, int], list[int]] = {}
        n = len(self.active)
        line["length"][:n], line["count"][:n], line["cap"][:n] = self.length_B, self.count_B, self.cap_B
        for i, row in enumerate(self.active):
            params = row.request.params
            line["key"][i], line["top_k"][i], warm[i], top_p[i] = (
                row.key,
                params.top_k,
                params.temperature,
                params.top_p,
            )
            if params.allowed is not None:
                line["low"][i], line["high"][i] = params.allowed
            if i >= len(old):
                line["token"][i] = row.token
            whole = (len(row.request.ids) - 1) // self.pages.size
            if whole * self.pages.size >= SHARED_LEAST:  # a page stands for all the tokens before it too
                together.setdefault((whole, row.pages[whole - 1]), []).append(i)
        tiles, size = [], step.tiles_BR.shape[1]
        for (whole, _), members in together.items():
            for at in range(0, len(members), size):
                part = members[at : at + size]
                if len(part) > 1:
                    tiles.append(part + [-1] * (size - len(part)))
                    line["done"][part] = whole * self.pages.size
        order = np.zeros(rows, np.int64)
        order[: len(old)] = old
        moved, order_B = to_device(host, device), to_device(order, device)
        token_B = step.line("token")[order_B]
        if step.seen_BV is not None:
            self._upload_seen(old, order_B)
        step.numbers[:, :rows] = moved
        step.line("token", len(old)).copy_(token_B[: len(old)])
        step.temperature_B[:rows], step.top_p_B[:rows] = to_device(warm, device), to_device(top_p, device)
        step.cuts = bool((line["top_k"] > 0).any() or (top_p < 1).any())
        self._upload_table()
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
            seen_BV[i, [*self.active[i].given, self.active[i].token]] = True

    # What the device does

    def _window(self) -> None:
        """Some steps of all rows, forced spans between them, and the copy of what was sampled."""
        if not self.active:
            return
        step = self.step
        rows = bucket_of(len(self.active), step.slots)
        index_B = np.array([row.index for row in self.active])
        left_B = self.answers.ends[index_B] - self.count_B
        steps = int(min(WINDOW, left_B.max()))
        replay = step.replay(rows, self.params)
        began_B = self.count_B.copy()
        self.texts, self.on_device = {}, False
        step.tick_1.zero_()
        for _ in range(steps):
            due = np.flatnonzero(self.forced_B == self.count_B)
            if len(due):
                self._force(due)
            replay()
            self.count_B += 1
            self.length_B = np.minimum(self.length_B + 1, self.cap_B - 1)
        n = len(self.active)
        (tokens, logprobs), ready = _to_host(step.tokens_WB[:steps, :n], step.logprobs_WB[:steps, :n])
        window = Window(tokens, logprobs, ready, index_B, began_B, np.full(n, steps))
        self.pending.append((window, list(self.active)))
        self.use.made += steps * n
        self.use.passes += steps * n
        if self.copying:
            self.copying.went_plain()

    def _copy_window(self, ahead: int) -> None:
        """Some passes of all rows over proposed tokens. A row waits at its end, before a forced span, and where its
        pages end.
        """
        if not self.active:
            return
        step, device, n, copying = self.step, self.decoder.device, len(self.active), self.copying
        assert copying is not None and not self.pending
        due = np.flatnonzero(self.forced_B == self.count_B)
        if len(due):
            self._force(due)
        if not self.on_device:
            self._upload_texts()
        index_B = np.array([row.index for row in self.active])
        ends_B = self.answers.ends[index_B]
        limit_B = np.minimum(np.minimum(ends_B, self.forced_B), self.count_B + self.cap_B - 1 - ahead - self.length_B)
        step.line("limit", n).copy_(to_device(limit_B, device))
        for name in ("made", "copied", "passes"):
            step.line(name).zero_()
        rows = bucket_of(n, step.slots)
        replay = step.replay(rows, None, ahead)
        passes = copying.passes(int((limit_B - self.count_B).max()))
        for _ in range(passes):
            replay()
        most = passes * (ahead + 1)
        lines = torch.stack([step.line(name, n) for name in ("made", "copied", "passes")])
        (tokens, logprobs, lines), ready = _to_host(step.tokens_BM[:n, :most], step.logprobs_BM[:n, :most], lines)
        if ready is not None:
            ready.synchronize()
        made_B, copied_B, passes_B = lines.numpy()
        ids_BM = tokens.numpy()
        for i, row in enumerate(self.active):
            first, made = int(self.length_B[i]) + 1, int(made_B[i])
            self.texts[row.index][first : first + made] = ids_BM[i, :made]
        window = Window(tokens.T, logprobs.T, None, index_B, self.count_B.copy(), made_B)
        self.pending.append((window, list(self.active)))
        self.count_B, self.length_B = self.count_B + made_B, self.length_B + made_B
        self.use.made += int(made_B.sum())
        self.use.copied += int(copied_B.sum())
        self.use.passes += int(passes_B.sum())
        copying.saw(rows, ahead, int(made_B.sum()), int(passes_B.sum()))
        self._settle()

    def _upload_texts(self) -> None:
        """Give the device all tokens of the rows."""
        known, self.texts = self.texts, {}
        for i, row in enumerate(self.active):
            text = known.get(row.index)
            if text is None:
                text = np.zeros(row.request.length, np.int32)
                ids = self.answers.sequence(row.index, int(self.count_B[i]))
                if len(ids) <= self.length_B[i]:  # a span was fed, and nothing sampled behind it
                    ids += row.request.forced[row.spans - 1][1]
                text[: len(ids)] = ids
            self.texts[row.index] = text
        width = int(self.length_B.max()) + 1
        host = np.zeros((len(self.active), width), np.int32)
        for i, row in enumerate(self.active):
            text = self.texts[row.index][:width]
            host[i, : len(text)] = text
        self.step.text_BL[: len(self.active), :width] = to_device(host, self.decoder.device)
        self.on_device = True

    def _force(self, due: np.ndarray) -> None:
        """Feed a forced span to these rows: all but its last token now, behind the one just sampled; the last is the
        next step's input.
        """
        step, device = self.step, self.decoder.device
        spans = [self.active[i].request.forced[self.active[i].spans][1] for i in due]
        at_N = to_device(due.astype(np.int64), device)
        if step.seen_BV is not None:
            for i, span in zip(due, spans, strict=True):
                step.seen_BV[i, list(span)] = True
        lengths = [len(span) for span in spans]
        given = [(0, *span[:-1]) for span in spans]
        stand, token_N = step.rows(len(self.active)).take(at_N), step.line("token")[at_N]
        for low, high in _parts(lengths):
            rows = Rows(stand.table_NP[low:high], stand.len_N[low:high], stand.page)
            ids_T, tiles = self._tiles(given[low:high])
            first_N = np.cumsum([0, *lengths[low : high - 1]])
            ids_T[to_device(first_N, device)] = token_N[low:high]
            self.decoder.extend(ids_T, rows, tiles)
        step.line("token").index_copy_(0, at_N, to_device(np.array([span[-1] for span in spans]), device))
        step.line("length").index_add_(0, at_N, to_device(np.array(lengths), device))
        for i, span in zip(due, spans, strict=True):
            if (text := self.texts.get(self.active[i].index)) is not None:
                first = int(self.length_B[i]) + 1
                text[first : first + len(span)] = span
        self.on_device = False
        self.length_B[due] += np.array(lengths)
        for i in due:
            self.active[i].spans += 1
            self.forced_B[i] = self.active[i].next_forced

    def _copy(self, rows: list[Row]) -> None:
        """Copy pages whose beginning is what rows need next."""
        if not rows:
            return
        pairs = [(row.copy[0], row.pages[row.stored // self.pages.size]) for row in rows if row.copy]
        self.pool.copy(*to_device(np.array(pairs, np.int64).T, self.decoder.device).unbind())
        for row in rows:
            assert row.copy is not None
            self.pages.release([row.copy[0]])
            row.stored, row.copy = row.stored + row.copy[1], None

    def _store(self, pieces: list[tuple[Row, int, int]]) -> None:
        """Compute and store (row, first, count) of given tokens, in passes of bounded size; a long prompt goes in
        several.
        """
        device = self.decoder.device
        for low, high in _parts([length for _, _, length in pieces]):
            part = pieces[low:high]
            table_NP = np.zeros((len(part), max(len(row.pages) for row, _, _ in part)), np.int32)
            for n, (row, _, _) in enumerate(part):
                table_NP[n, : len(row.pages)] = row.pages
            start_N = np.array([at for _, at, _ in part], np.int64)
            ids_T, tiles = self._tiles([row.given[at : at + length] for row, at, length in part])
            self.decoder.extend(
                ids_T, Rows(to_device(table_NP, device), to_device(start_N, device), self.pages.size), tiles
            )
            self.use.stored += len(ids_T)

    def _tiles(self, given: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, Tiles]:
        """Token ids end to end, and how attention goes over them."""
        most, device = self.step.tiles_BR.shape[1], self.decoder.device
        lengths = np.array([len(ids) for ids in given])
        first_N = np.cumsum(lengths) - lengths
        counts = -(-lengths // most)
        row_X = np.repeat(np.arange(len(given)), counts)
        offset_X = (np.arange(len(row_X)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
        tile_X4 = np.stack(
            [row_X, first_N[row_X] + offset_X, offset_X, np.minimum(most, lengths[row_X] - offset_X)], 1
        ).astype(np.int32)
        row_T = np.repeat(np.arange(len(given)), lengths)
        offset_T = np.arange(len(row_T)) - first_N[row_T]
        ids_T = np.concatenate([np.asarray(ids, np.int64) for ids in given])
        moved = [to_device(x, device) for x in (tile_X4, row_T, offset_T, ids_T)]
        return moved[3], Tiles(moved[0], moved[1], moved[2], most)

    # What comes back

    def _settle(self) -> None:
        """Read all that was sampled."""
        while self.pending:
            self._read(*self.pending.popleft())

    def _read(self, window: Window, rows: list[Row]) -> None:
        """Put a window's tokens where they belong."""
        over = self.answers.take(window, self.version)
        if self.decoder.notes:
            self._fetch_routes([rows[i] for i in over])
        self._let_go()

    def _fetch_routes(self, rows: list[Row]) -> None:
        """Bring what is noted of these rows' tokens to the host, while they still have their pages."""
        if not rows:
            return
        pages = to_device(np.array([page for row in rows for page in row.pages], np.int64), self.decoder.device)
        (notes,), ready = _to_host(self.pool.experts[pages])
        for row, part in zip(rows, notes.split([len(row.pages) for row in rows]), strict=True):
            self.routes[row.index] = part, ready


def _to_host(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
    """Copies on the host, and when they are there."""
    if not tensors[0].is_cuda:
        return [x.clone() for x in tensors], None
    copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in tensors]
    ready = torch.cuda.Event()
    ready.record()
    return copies, ready


def _parts(lengths: list[int]) -> list[tuple[int, int]]:
    """Runs of neighbours with at most CHUNK_TOKENS tokens each."""
    parts, low, total = [], 0, 0
    for i, length in enumerate(lengths):
        if i > low and total + length > CHUNK_TOKENS:
            parts.append((low, i))
            low, total = i, 0
        total += length
    return [*parts, (low, len(lengths))] if lengths else []
