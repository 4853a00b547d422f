"""Rollouts one step ahead of training: while step s is trained, step s + 1 is sampled by the weights from before it.

Steps are taken in the order they were submitted, so that a run does not depend on which finished first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ...core.errors import DeadlineError

T = TypeVar("T")


class Ahead(Generic[T]):
    """Gives `produce(step)` for rising steps; with `ahead` = 1 the next one is made in the background meanwhile."""

    def __init__(self, produce: Callable[[int], T], steps: range, ahead: int, deadline_s: float) -> None:
        if ahead not in (0, 1):
            raise ValueError(f"ahead: {ahead} must be 0 (on-policy) or 1 (one step off)")
        self.produce, self.steps, self.ahead, self.deadline_s = produce, steps, ahead, deadline_s
        self._thread: threading.Thread | None = None
        self._made: dict[int, T | BaseException] = {}

    def take(self, step: int) -> T:
        """The rollouts of a step; begins the next one before it returns."""
        self.settle()
        made = self._made.pop(step) if step in self._made else self.produce(step)
        if isinstance(made, BaseException):
            raise made
        if self.ahead and step + 1 in self.steps:
            self._thread = threading.Thread(
                target=self._work, args=(step + 1,), daemon=True, name=f"rollout-{step + 1}"
            )
            self._thread.start()
        return made

    def settle(self) -> None:
        """Wait until nothing is being sampled, so that weights may change."""
        if self._thread is not None:
            self._thread.join(self.deadline_s)
            if self._thread.is_alive():
                raise DeadlineError(f"{self._thread.name}: the rollouts did not finish within {self.deadline_s:.0f} s")
            self._thread = None

    def _work(self, step: int) -> None:
        try:
            self._made[step] = self.produce(step)
        except BaseException as error:
            self._made[step] = error
