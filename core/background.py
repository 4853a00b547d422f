"""Work that goes on in a thread beside the one that asked for it, such as the writing of a checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .errors import DeadlineError


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

    def wait(self, seconds: float) -> BaseException | None:
        """Wait for the end; the error comes back, which is of its own kind where the time did not suffice."""
        self.join(seconds)
        return DeadlineError(f"{self.what} was not written in {seconds:.0f} s") if self.is_alive() else self.error
