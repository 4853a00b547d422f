"""Many calls at once, each with a deadline. A call that hangs is left behind in a daemon thread and comes back as
Invalid.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ...data.trajectory import Invalid


def run_all(calls: Sequence[Callable[[], Any]], *, workers: int, deadline_s: float, what: str) -> list[Any | Invalid]:
    """Results in the order of the calls. An exception or a missed deadline gives Invalid with the reason, never a
    value.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(calls)):
        waiting.put(index)
    done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    begun: dict[int, float] = {}
    threads = 0

    def work() -> None:
        while True:
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                return
            begun[index] = time.monotonic()
            try:
                done.put((index, calls[index]()))
            except Exception as error:
                done.put((index, Invalid(f"{what}: {type(error).__name__}: {error}")))

    def start() -> None:
        nonlocal threads
        threads += 1
        threading.Thread(target=work, daemon=True, name=f"{what}-{threads}").start()

    for _ in range(min(workers, len(calls))):
        start()
    results: dict[int, Any] = {}
    while len(results) < len(calls):
        try:
            index, value = done.get(timeout=min(deadline_s, 0.05))
            results.setdefault(index, value)  # an answer after its deadline changes nothing
        except queue.Empty:
            now = time.monotonic()
            for index, since in list(begun.items()):
                if index not in results and now - since > deadline_s:
                    results[index] = Invalid(f"{what}: did not finish within {deadline_s:g} s")
                    start()  # its thread is lost; another takes its place
    return [results[i] for i in range(len(calls))]


class Calls:
    """Calls of coroutines' in daemon threads, at most `workers` at once. A deadline counts from when a call begins."""

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
                done.cancel()  # its thread is lost, and nobody counts on it
                return Invalid(f"{what}: did not finish within {deadline_s:g} s")
            return done.result()

    def close(self) -> None:
        """Let the threads go."""
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
                self.loop.call_soon_threadsafe(self._settle, done, value)
            except RuntimeError:  # it came so late that the rollout is over
                return

    def _settle(self, done: asyncio.Future[Any], value: Any) -> None:
        self.idle += 1
        if not done.done():  # an answer after its deadline changes nothing
            done.set_result(value)
