"""Requests answered as they arrive: the sampler runs in its own thread, and each request gets a future.

The sampler takes tickets between two windows of tokens, or one request at a time, and reads weights only within a
`turn`; so weights may change while requests wait for their answers.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ...core.errors import DeadlineError, WorkerError
from ...data.trajectory import Invalid
from .sampler import Sample, Sampler, SampleRequest

CLOSE_S = 60.0
Note = Callable[[list[tuple[SampleRequest, Sample]]], None]


@dataclass(eq=False)
class Ticket:
    """A pending request. `note` is called with its sample, batched with others that finish together, before the future
    is set.
    """

    request: SampleRequest
    note: Note | None = None
    answer: Future[Sample | Invalid] = field(default_factory=Future)


class Stream:
    """A sampler that can be asked at any time. One with `serve(stream)` takes tickets as they arrive; any other is
    called again and again with all that wait.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self._changed = threading.Condition()
        self._waiting: list[Ticket] = []
        self._open: set[Ticket] = set()
        self._closed = self._barred = False
        self._turns = 0
        self._fault: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def batch_invariant(self) -> bool:
        """Whether log-probs must equal those of a trainer that scores in that mode."""
        return getattr(self.sampler, "batch_invariant", False)

    # For callers.

    def submit(self, request: SampleRequest, note: Note | None = None) -> Future[Sample | Invalid]:
        """Ask for a continuation."""
        ticket = Ticket(request, note)
        with self._changed:
            self._require_open()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True, name="sampler")
                self._thread.start()
            self._waiting.append(ticket)
            self._open.add(ticket)
            self._changed.notify_all()
        return ticket.answer

    def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]:
        """Continue every request; results come back in the order of the requests."""
        return [answer.result() for answer in [self.submit(request) for request in requests]]

    @contextmanager
    def paused(self, deadline_s: float) -> Iterator[None]:
        """Keep the sampler from taking a turn, so that weights may change."""
        with self._changed:
            self._barred = True
            if not self._changed.wait_for(lambda: self._turns == 0, deadline_s):
                self._barred = False
                self._changed.notify_all()
                raise DeadlineError(f"the sampler did not pause within {deadline_s:.0f} s for new weights")
        try:
            yield
        finally:
            with self._changed:
                self._barred = False
                self._changed.notify_all()

    def close(self) -> None:
        """Stop sampling; pending requests get an error."""
        self.fail(WorkerError("the sampler was closed"))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)
            if self._thread.is_alive() and sys.exception() is None:  # an error already being raised takes precedence
                raise DeadlineError(f"the sampler did not stop within {CLOSE_S:.0f} s")

    # For the sampler.

    def take(self, wait: bool) -> list[Ticket] | None:
        """Tickets submitted since the last call, waiting for one if asked to; None once the stream is closed."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._waiting or self._closed)
            taken, self._waiting = self._waiting, []
            return None if self._closed else taken

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A period in which weights are read and must not change."""
        with self._changed:
            self._changed.wait_for(lambda: not self._barred)  # as long as a publish takes, which has a deadline
            self._turns += 1
        try:
            yield
        finally:
            with self._changed:
                self._turns -= 1
                self._changed.notify_all()

    def give(self, answered: Sequence[tuple[Ticket, Sample | Invalid]]) -> None:
        """Answer tickets."""
        noted: dict[Note, list[tuple[SampleRequest, Sample]]] = {}
        for ticket, sample in answered:
            if ticket.note is not None and not isinstance(sample, Invalid):
                noted.setdefault(ticket.note, []).append((ticket.request, sample))
        for note, pairs in noted.items():
            note(pairs)
        with self._changed:
            own = [(ticket, sample) for ticket, sample in answered if ticket in self._open]
            self._open.difference_update(ticket for ticket, _ in own)
        for ticket, sample in own:
            if ticket.answer.set_running_or_notify_cancel():
                ticket.answer.set_result(sample)

    def fail(self, error: BaseException) -> None:
        """Fail the stream: pending and later requests raise this error."""
        with self._changed:
            self._fault = self._fault or error
            self._closed = True
            lost, self._open, self._waiting = self._open, set(), []
            self._changed.notify_all()
        for ticket in lost:
            if ticket.answer.set_running_or_notify_cancel():
                ticket.answer.set_exception(self._fault)

    def _require_open(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _work(self) -> None:
        try:
            serve: Any = getattr(self.sampler, "serve", None)
            if serve is not None:
                serve(self)
                return
            while (tickets := self.take(wait=True)) is not None:
                with self.turn():
                    samples = self.sampler.generate([ticket.request for ticket in tickets])
                self.give(list(zip(tickets, samples, strict=True)))
        except BaseException as error:
            self.fail(error)
