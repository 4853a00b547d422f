"""Rollouts ahead of training: a step's episodes begin up to `ahead` steps before they are trained on.

With `ahead` = k the episodes of step s + k begin once the weights of step s exist, so that no token is older than k
steps when it is trained on. Steps are taken whole and in order, whichever finishes first: no episode is left out for
being long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ...core.errors import DeadlineError

T = TypeVar("T")


class Ahead(Generic[T]):
    """The rollouts of consecutive steps. `begin(step)` makes the episodes and returns a function that plays them; it
    runs in a thread as soon as `reach` allows it, or else when the step is taken.
    """

    def __init__(self, begin: Callable[[int], Callable[[], T]], steps: range, ahead: int, deadline_s: float) -> None:
        self.begin, self.steps, self.ahead, self.deadline_s = begin, steps, ahead, deadline_s
        self._next = steps.start
        self._begun: dict[int, _Play[T]] = {}

    def reach(self, step: int) -> None:
        """The weights after `step` steps exist: start the rollouts that they allow."""
        while self.ahead and self._next <= step + self.ahead and self._next in self.steps:
            self._begun[self._next] = _Play(self.begin(self._next), f"rollouts of step {self._next + 1}")
            self._next += 1

    def take(self, step: int) -> T:
        """The rollouts of a step; waits until all of them are over."""
        return self._begun.pop(step).result(self.deadline_s) if step in self._begun else self.begin(step)()


class _Play(Generic[T]):
    """A call in a daemon thread."""

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._call = call
        self._value: T | None = None
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True, name=name)
        self._thread.start()

    def result(self, deadline_s: float) -> T:
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise DeadlineError(f"{self._thread.name}: they did not finish within {deadline_s:.0f} s")
        if self._fault is not None:
            raise self._fault
        return self._value  # type: ignore[return-value]

    def _work(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._fault = error
