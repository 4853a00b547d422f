"""Saves one checkpoint after another until it is killed: `python -m terrella.tests.core.saver FOLDER`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from uuid import uuid4

import torch

from terrella.core.checkpoint import Entry, publish, write_shard
from terrella.core.files import make_folder, write_json
from terrella.core.mcore.params import Shard


def path(root: Path, step: int) -> Path:
    """Folder of a step's checkpoint."""
    return root / f"step_{step:08d}"


def steps(root: Path) -> list[int]:
    """Steps with a whole checkpoint, oldest first; one that was just replaced counts until it is gone."""
    kept = {folder.parent.name.removeprefix(".replaced-") for folder in root.glob("*step_*/manifest.json")}
    return sorted(int(name.removeprefix("step_")) for name in kept if name.startswith("step_"))


def main() -> None:
    root = Path(sys.argv[1])
    step = (steps(root) or [0])[-1]
    print("saving", flush=True)
    while True:
        step += 1
        if step % 3 == 0:
            step -= 1  # replaces the checkpoint of the step before
            for old in steps(root)[:-3]:
                discard(path(root, old))
            save(root, step)
            step += 1
        save(root, step)


def discard(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder.rename(folder.with_name(f".deleting-{uuid4().hex[:8]}")))  # never half of what looks whole


def save(root: Path, step: int) -> None:
    folder = make_folder(root / f".saving-step_{step:08d}-{uuid4().hex[:8]}")
    write_json(folder / "extra.json", {"step": step})
    size = 1 << 19
    shards = []
    for rank in range(2):
        entries = [Entry("weight", "param", (size,), Shard(0, rank, 2), 0)]
        shards.append(write_shard(folder, rank, {"0": torch.full((size,), float(step))}, entries))
    publish(folder, path(root, step), {"step": step}, shards)


if __name__ == "__main__":
    main()
