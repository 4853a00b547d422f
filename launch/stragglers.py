"""Finds ranks that slow the others down, during the run. It needs no extra communication: the numbers are sent with the
gather at the end of every step.

A rank that waits least has worked most, so a step's time is counted without the waits for other ranks. Waits inside the
collectives of training itself cannot be seen from Python; a small timed product every `PROBE_EVERY` steps covers those.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from dataclasses import dataclass, field

from ..core.health import stragglers, timed_product

SLOW = "logs/slow-ranks.json"  # in a run directory: the ranks that are currently slow
WINDOW = 10  # steps that are judged together
PROBE_EVERY = 20
WORK_FLOOR_S = 0.5  # seconds per window: smaller differences do not matter


@dataclass(frozen=True)
class Lap:
    """One rank's step: seconds of its own work, seconds of the probe if there was one, and its host."""

    work_s: float
    probe_s: float | None
    host: str


@dataclass(frozen=True)
class Slow:
    """A rank that takes longer than the median rank."""

    rank: int
    host: str
    ratio: float
    what: str  # "work" or "arithmetic"

    def text(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.what} takes {self.ratio:.1f} x as long as on the median rank"


@dataclass
class Pace:
    """One rank's stopwatch, and every rank's judgement of all of them."""

    begun: float = field(default_factory=time.monotonic)
    waited: float = 0.0
    laps: int = 0
    window: deque[list[float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    slow_work: list[Slow] = field(default_factory=list)
    slow_probe: list[Slow] = field(default_factory=list)

    def lap(self) -> Lap:
        """This rank's step, which ends now."""
        now = time.monotonic()
        work = max(0.0, now - self.begun - self.waited)
        self.laps += 1
        probe = timed_product() if self.laps % PROBE_EVERY == 0 else None
        return Lap(work, probe, socket.gethostname())

    def judge(self, laps: list[Lap]) -> list[Slow]:
        """Add all ranks' laps; returns newly slow ranks. Every rank comes to the same judgement."""
        self.begun, self.waited = time.monotonic(), 0.0
        before = {(s.rank, s.what) for s in self.slow}
        if self.laps > 1:  # the first step includes the start of engines and servers
            self.window.append([lap.work_s for lap in laps])
        if len(self.window) == WINDOW:
            self.slow_work = _judge(
                [sum(times) for times in zip(*self.window, strict=True)], laps, "work", WORK_FLOOR_S
            )
        probes = [lap.probe_s for lap in laps if lap.probe_s is not None]
        if len(probes) == len(laps):
            self.slow_probe = _judge(probes, laps, "arithmetic", 0.2 * sorted(probes)[len(probes) // 2])
        return [s for s in self.slow if (s.rank, s.what) not in before]

    @property
    def slow(self) -> list[Slow]:
        return self.slow_work + self.slow_probe

    def values(self) -> dict[str, float]:
        """Values for the record: the slowest rank and by how much, while there is one."""
        worst = max(self.slow, key=lambda s: s.ratio, default=None)
        return {} if worst is None else {"time/slow_rank": worst.rank, "time/slow_rank_ratio": round(worst.ratio, 2)}


def _judge(seconds: list[float], laps: list[Lap], what: str, floor_s: float) -> list[Slow]:
    typical = sorted(seconds)[len(seconds) // 2 if len(seconds) > 2 else 0]
    return [
        Slow(rank, laps[rank].host, seconds[rank] / max(typical, 1e-9), what)
        for rank in stragglers(seconds, floor_s=floor_s)
    ]
