"""Worker processes that read ahead. They hold no state: which samples were consumed is counted where they are handed
out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

# from a place on, of one worker of so many, so many samples each
Blocks = Callable[[int, int, int, int], Iterator[Iterator[Any]]]
BLOCK = 64
DEADLINE_S = 600.0


class _Ahead(IterableDataset):
    def __init__(self, blocks: Blocks, start: int) -> None:
        self.blocks, self.start = blocks, start

    def __iter__(self) -> Iterator[list[Any]]:
        info = get_worker_info()
        assert info is not None
        return (list(block) for block in self.blocks(self.start, info.id, info.num_workers, BLOCK))


def _as_it_is(block: list[Any]) -> list[Any]:
    return block


def read_ahead(blocks: Blocks, start: int, workers: int) -> Iterator[list[Any]]:
    """Blocks of samples from a place on. The loader asks its workers in turn, so the order is that of one process."""
    loader = DataLoader(
        _Ahead(blocks, start),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4,
        timeout=DEADLINE_S,
        collate_fn=_as_it_is,
        multiprocessing_context="fork",
    )
    return iter(loader)
