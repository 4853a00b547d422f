"""Work that goes on in a thread beside the one that asked for it, such as the writing of a checkpoint."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from .errors import DeadlineError

ASK_SECONDS = 1.0  # between two questions whether all ranks are done


class Background(threading.Thread):
    """A function in a thread of its own; its value and its error are asked for later."""

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
            del self._function  # and with it what it holds in memory


def wait_for_all(work: Background | None, any_rank: Callable[[bool], bool], seconds: float) -> BaseException | None:
    """Wait until no rank's work goes on; this rank's error comes back, which is of its own kind where the time did
    not suffice. Collective: ranks whose work is done ask the others again and again, as one collective must end
    within the process group's timeout.
    """
    end = time.monotonic() + seconds
    while any_rank(work is not None and work.is_alive() and time.monotonic() < end):
        if work is not None:
            work.join(ASK_SECONDS)
    if work is None or not work.is_alive():
        return work and work.error
    return DeadlineError(f"{work.what} was not written in {seconds:.0f} s")
