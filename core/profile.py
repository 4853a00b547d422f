"""`--profile`: a trace of a few steps by torch's profiler, with NVTX ranges where CUDA is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from .files import make_folder

PROFILE_VARIABLE = "TERRELLA_PROFILE"  # the folder for the traces; `terrella train --profile` sets it for its ranks
_claimed = False


def claim(rank: int) -> Profiler | None:
    """The profiler that `--profile` asked for. The first engine of a process that trains gets it: torch records one
    thing at a time.
    """
    global _claimed
    folder = os.environ.get(PROFILE_VARIABLE)
    if not folder or _claimed:
        return None
    _claimed = True
    return Profiler(Path(folder), rank)


@contextlib.contextmanager
def marked(name: str) -> Iterator[None]:
    """A named range in traces of torch's profiler and, where CUDA is, of Nsight."""
    import torch

    nvtx = torch.cuda.nvtx.range(name) if torch.cuda.is_available() else contextlib.nullcontext()
    with nvtx, torch.profiler.record_function(name):
        yield


class Profiler:
    """Records the steps [first, first + count) of a rank and writes `rank-R.json` (Chrome trace) into a folder."""

    def __init__(self, folder: Path, rank: int, first: int = 3, count: int = 2) -> None:
        import torch

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
        with marked(name) if self.first <= self.seen < self.first + self.count else contextlib.nullcontext():
            yield
        self.seen += 1
        if self.seen == self.first + self.count:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self.path))
