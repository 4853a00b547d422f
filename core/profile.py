"""`--profile`: a trace of a few steps by torch's profiler, with NVTX ranges where CUDA is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from .files import make_folder


class Profiler:
    """Records the steps [first, first + count) of a rank and writes `rank-R.json` (Chrome trace) into a folder."""

    def __init__(self, folder: Path, rank: int, first: int = 3, count: int = 2) -> None:
        self.path = make_folder(folder) / f"rank-{rank}.json"
        self.first, self.count, self.seen = first, count, 0
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True)

    @contextlib.contextmanager
    def step(self, name: str = "step") -> Iterator[None]:
        """Wrap each step in this."""
        if self.seen == self.first:
            self._profile.start()
        inside = self.first <= self.seen < self.first + self.count
        nvtx = torch.cuda.nvtx.range(name) if inside and torch.cuda.is_available() else contextlib.nullcontext()
        with nvtx, torch.profiler.record_function(name) if inside else contextlib.nullcontext():
            yield
        self.seen += 1
        if self.seen == self.first + self.count:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self.path))
