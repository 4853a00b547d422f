"""Progress with an ETA: a live line on a terminal, an occasional plain line in a log."""

from __future__ import annotations

import os
import shutil
import sys
import time

PLAIN_EVERY_S = 10.0
LIVE_EVERY_S = 0.2


def clock(seconds: float) -> str:
    """A duration for people: 42s, 3m05s, 2h07m."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    return (
        f"{seconds // 60}m{seconds % 60:02d}s" if seconds < 3600 else f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    )


def say(line: str) -> None:
    """Print a line, replacing an unfinished live line."""
    _put(("\r\x1b[2K" if sys.stdout.isatty() else "") + line + "\n")


def _put(text: str) -> None:
    """Write to stdout. The reader may be gone, as after Ctrl-C in `terrella train ... | tee log`; work continues."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Progress:
    """Counts towards `total`; `speak=False` keeps the other ranks silent."""

    def __init__(self, title: str, total: int, *, start: int = 0, speak: bool = True) -> None:
        self.title, self.total, self.start, self.speak = title, total, start, speak
        self.started = self.last = time.monotonic()
        self.live = speak and sys.stdout.isatty()
        if speak and start:
            self._print(f"{title}: resuming at {start} of {total}")

    def update(self, done: int, text: str = "") -> None:
        """Report progress; printed at most every few seconds, and at the end."""
        moment = time.monotonic()
        every = LIVE_EVERY_S if self.live else PLAIN_EVERY_S
        if not self.speak or (moment - self.last < every and done < self.total):
            return
        self.last = moment
        rate = (done - self.start) / max(moment - self.started, 1e-9)
        left = (
            f"ETA {clock((self.total - done) / rate)}"
            if rate > 0 and done < self.total
            else f"took {clock(moment - self.started)}"
        )
        self._print(f"{self.title}: {done}/{self.total}  {left}  {text}".rstrip(), keep=done >= self.total)

    def _print(self, line: str, keep: bool = True) -> None:
        if self.live:
            line = line[: shutil.get_terminal_size().columns - 1]  # a line that wraps cannot be overwritten
            _put(f"\r\x1b[2K{line}" + ("\n" if keep else ""))
        else:
            _put(line + "\n")
