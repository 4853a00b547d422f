"""Many calls at once, each with a deadline. A call that hangs is left behind in a daemon thread and comes back as
Invalid.
"""

from __future__ import annotations

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
