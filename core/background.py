"""Work in a background thread, such as writing a checkpoint."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from .errors import DeadlineError

ASK_SECONDS = 1.0  # between two checks whether all ranks are done


class Background(threading.Thread):
    """Runs a function in its own thread and keeps its value or its error."""

    def __init__(self, what: str, function: Callable[[], Any]) -> None:
        super().__init__(name=what, daemon=True)
        self.what, self._function = what, function
        self.value: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value = self._function()
        except BaseException as error:
            self.error = error
        finally:
            del self._function  # frees what it holds in memory


def wait_for_all(work: Background | None, any_rank: Callable[[bool], bool], seconds: float) -> BaseException | None:
    """Wait until every rank's work is done; returns this rank's error, a DeadlineError where time ran out. Collective:
    ranks that are done keep polling the others, because a single collective must end within the process group's
    timeout.
    """
    end = time.monotonic() + seconds
    while any_rank(work is not None and work.is_alive() and time.monotonic() < end):
        if work is not None:
            work.join(ASK_SECONDS)
    if work is None or not work.is_alive():
        return work and work.error
    return DeadlineError(f"{work.what} was not written in {seconds:.0f} s")
