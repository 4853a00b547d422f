"""Concurrent calls, each with a deadline. A call that hangs is abandoned in a daemon thread and returns Invalid."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

from ...data.trajectory import Invalid

T = TypeVar("T")


class Calls:
    """Runs calls for coroutines in daemon threads, at most `workers` at once. A deadline starts when its call does."""

    def __init__(self, workers: int) -> None:
        self.loop, self.room = asyncio.get_running_loop(), asyncio.Semaphore(workers)
        self.waiting: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any], str] | None] = queue.SimpleQueue()
        self.idle = 0  # threads

    async def __call__(self, call: Callable[[], Any], deadline_s: float, what: str) -> Any | Invalid:
        """The call's result; an exception or a missed deadline gives Invalid with the reason, never a value."""
        async with self.room:
            done = self.loop.create_future()
            self.waiting.put((call, done, what))
            if self.idle:
                self.idle -= 1
            else:
                threading.Thread(target=self._work, daemon=True, name=what).start()
            await asyncio.wait([done], timeout=deadline_s)
            if not done.done():
                done.cancel()  # its thread is abandoned
                return Invalid(f"{what}: did not finish within {deadline_s:g} s")
            return done.result()

    def close(self) -> None:
        """Let the threads end."""
        for _ in range(self.idle):
            self.waiting.put(None)

    def _work(self) -> None:
        while (item := self.waiting.get()) is not None:
            call, done, what = item
            try:
                value = call()
            except Exception as error:
                value = Invalid(f"{what}: {type(error).__name__}: {error}")
            try:
                self.loop.call_soon_threadsafe(self._resolve, done, value)
            except RuntimeError:  # so late that the rollout is over
                return

    def _resolve(self, done: asyncio.Future[Any], value: Any) -> None:
        self.idle += 1
        if not done.done():  # a result after its deadline is dropped
            done.set_result(value)


def run_all(calls: Sequence[Callable[[], Any]], *, workers: int, deadline_s: float, what: str) -> list[Any | Invalid]:
    """Results in the order of the calls. An exception or a missed deadline gives Invalid with the reason, never a
    value.
    """

    async def together() -> list[Any | Invalid]:
        lane = Calls(workers)
        try:
            return await asyncio.gather(*(lane(call, deadline_s, what) for call in calls))
        finally:
            lane.close()

    return run_to_end(together())


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end. In a notebook, whose thread already runs an event loop, it runs in another thread."""
    if asyncio._get_running_loop() is None:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as apart:
        return apart.submit(copy_context().run, asyncio.run, work).result()
