"""Timing on a GPU: events around each call, the L2 cache flushed before it, medians with their 20th and 80th
percentiles.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    ms: float
    p20: float
    p80: float
    peak_gb: float  # memory the call took beyond what was allocated before it


def _timing(times: list[float], peak: int) -> Timing:
    points = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    low, middle, high = torch.quantile(torch.tensor(times, dtype=torch.float64), points).tolist()
    return Timing(middle, low, high, peak / 1e9)


class Timer:
    """Holds the buffer that flushes L2; `budget_s` bounds the time spent on one figure."""

    def __init__(self, budget_s: float = 0.3):
        self.flush = torch.zeros(64 << 20, dtype=torch.int32, device="cuda")
        self.budget_s = budget_s
        self.before: Callable[[], object] = lambda: None

    def __call__(
        self, call: Callable[[], object], most: int = 60, before: Callable[[], object] | None = None
    ) -> Timing:
        """`before` runs untimed ahead of every call, to restore what the call overwrites."""
        self.before = before or (lambda: None)
        self.before()
        call()
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        first = self._once(call)
        peak = torch.cuda.max_memory_allocated() - base
        count = max(3, min(most, int(self.budget_s * 1e3 / max(first, 1e-3))))
        return _timing([self._once(call) for _ in range(count)], peak)

    def side_by_side(
        self, calls: dict[str, Callable[[], object]], rounds: int, load: Callable[[], object]
    ) -> dict[str, Timing]:
        """Time several long calls in turns, each right after the same `load`: at the power limit the clock depends
        on what ran before.
        """
        peaks = {}
        for name, call in calls.items():
            torch.cuda.synchronize()
            base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            call()
            torch.cuda.synchronize()
            peaks[name] = torch.cuda.max_memory_allocated() - base
        times: dict[str, list[float]] = {name: [] for name in calls}
        self.before = load
        for _ in range(rounds):
            for name, call in calls.items():
                times[name].append(self._once(call))
        return {name: _timing(times[name], peaks[name]) for name in calls}

    def warm(self, call: Callable[[], object], seconds: float = 0.7) -> None:
        """Bring the GPU to the clocks it can hold under this load, so that what is timed first has no advantage."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            call()
            torch.cuda.synchronize()

    def _once(self, call: Callable[[], object]) -> float:
        self.before()
        torch.amax(self.flush)  # by reading: lines that a write left dirty would be written back in the call's time
        torch.cuda._sleep(3_000_000)  # over a millisecond in which the launches get ahead of the GPU
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def graphed(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph replay: what a launch-bound op costs inside a captured step."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
