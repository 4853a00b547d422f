"""Web worlds that any thread may call: a browser belongs to the thread that started it, so their calls are carried
to a home thread.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..base import Action, Snapshot, StepResult, WorldFault
from .templates import Step
from .world import WebWorld

BROWSERS = 2  # home threads, and so browsers, of a process
_turns = itertools.count()


@functools.cache
def _home(number: int) -> tuple[ThreadPoolExecutor, int]:
    home = ThreadPoolExecutor(1, thread_name_prefix=f"browser-{number}")
    return home, home.submit(threading.get_ident).result(60)


class HostedWorld(WebWorld):
    """A world on one of a few home threads; those of one thread share a browser and take turns."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.home, self.ident = _home(next(_turns) % BROWSERS)

    def _at_home(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if threading.get_ident() == self.ident:
            return method(*arguments)
        waiting = self.home.submit(method, *arguments)
        # the browser's own deadlines come first; others may be in front, and a site may have to be reset
        limit_s = 60 * self.config.deadline_s + (self.config.reset_deadline_s if self.config.reset_command else 0)
        try:
            return waiting.result(limit_s)
        except TimeoutError as error:
            waiting.cancel()
            raise WorldFault(f"web: the browser's thread did not answer within {limit_s:g} s (deadline_s)") from error

    def reset(self, seed: int, sample: int = 0) -> str:
        return self._at_home(super().reset, seed, sample)

    def open_task(self, record: Any, steps: tuple[Step, ...] = ()) -> str:
        return self._at_home(super().open_task, record, steps)

    def step(self, action: Action) -> StepResult:
        return self._at_home(super().step, action)

    def restore(self, snapshot: Snapshot) -> None:
        self._at_home(super().restore, snapshot)

    def close(self) -> None:
        self._at_home(super().close)

    def __del__(self) -> None:
        """A world that nobody has any more gives its browser back."""
        backend = getattr(self, "backend", None)
        if backend is not None:
            # at the end of the process no thread takes work any more, and the browser ends too
            with contextlib.suppress(RuntimeError):
                self.home.submit(backend.close)
