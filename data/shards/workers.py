"""Worker processes that read ahead. They hold no state: which samples were consumed is counted where they are handed out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

if TYPE_CHECKING:
    from .reader import Reader

BLOCK = 64
DEADLINE_S = 600.0


class _Ahead(IterableDataset):
    def __init__(self, reader: Reader) -> None:
        self.reader, self.start = reader, reader.taken

    def __iter__(self) -> Iterator[list[Any]]:
        info = get_worker_info()
        assert info is not None
        return (list(block) for block in self.reader.blocks(self.start, info.id, info.num_workers, BLOCK))


def _as_it_is(block: list[Any]) -> list[Any]:
    return block


def read_ahead(reader: Reader, workers: int) -> Iterator[list[Any]]:
    """Blocks of samples from where the reader stands. The loader asks its workers in turn, so the order is that of one process."""
    loader = DataLoader(
        _Ahead(reader),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4,
        timeout=DEADLINE_S,
        collate_fn=_as_it_is,
        multiprocessing_context="fork",
    )
    return iter(loader)
