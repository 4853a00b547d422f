"""Saves one checkpoint after another until it is killed: `python -m terrella.tests.core.saver FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from uuid import uuid4

import torch

from terrella.core.checkpoint import CheckpointStore, Entry, publish, write_shard
from terrella.core.files import make_folder, write_json
from terrella.core.mcore.params import Shard


def main() -> None:
    store = CheckpointStore(Path(sys.argv[1]), keep_last=3)
    step = (store.steps() or [0])[-1]
    print("saving", flush=True)
    while True:
        step += 1
        if step % 3 == 0:
            step -= 1  # replaces the checkpoint of the step before
            store.prune()
            save(store, step)
            step += 1
        save(store, step)


def save(store: CheckpointStore, step: int) -> None:
    folder = make_folder(store.root / f".saving-step_{step:08d}-{uuid4().hex[:8]}")
    write_json(folder / "extra.json", {"step": step})
    size = 1 << 19
    shards = []
    for rank in range(2):
        entries = [Entry("weight", "param", (size,), Shard(0, rank, 2), 0)]
        shards.append(write_shard(folder, rank, {"0": torch.full((size,), float(step))}, entries))
    publish(folder, store.path(step), {"step": step}, shards)


if __name__ == "__main__":
    main()
