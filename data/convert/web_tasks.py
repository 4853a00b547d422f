"""WebArena task configurations: one list, or a folder of one file a task."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..schema import TASK
from .base import Item
from .lines import load_json, read_list


def read(source: Path, cursor: int | None) -> Iterator[Item]:
    """Tasks in the order of the list, or of the files' names."""
    if source.is_dir():
        files = sorted(source.glob("*.json"), key=lambda p: (len(p.stem), p.stem))
        tasks = ((i + 1, len(files), load_json(files[i])) for i in range(cursor or 0, len(files)))
    else:
        tasks = read_list(source, cursor)
    for index, total, task in tasks:
        where = f"{source.name}[{index - 1}]"
        if not isinstance(task, dict):
            yield Item(index, dropped="not a record", where=where, done=index / total)
            continue
        sample = {"task.json": task, "meta.json": {"schema": TASK, "index": index - 1}}
        yield Item(index, sample, key=f"task-{index - 1:05d}", where=where, done=index / total)
