"""Shards under attack: flips, cuts, deletions and swaps. What is read afterwards is the same, or is refused by name."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from terrella.data.errors import ShardError
from terrella.data.schema import TEXT
from terrella.data.shards import ShardSet, ShardWriter
from terrella.tests.data.test_shards_damage import text_sample

SEED = 20260917


def read(folder: Path) -> list[str]:
    shards = ShardSet(folder)
    return [repr(sorted(shards[i].items(), key=lambda pair: pair[0])) for i in range(len(shards))]


def damage(folder: Path, draw: random.Random) -> str:
    """One change to one file; says which."""
    # the README is for other people's readers
    victim = draw.choice(sorted(path for path in folder.iterdir() if path.name != "README.md"))
    held, how = (
        victim.read_bytes(),
        draw.choice(["flip", "flip", "flip", "cut", "delete", "delete shard", "grow", "swap"]),
    )
    if how == "flip":
        changed = bytearray(held)
        changed[draw.randrange(len(held))] ^= 1 << draw.randrange(8)
        victim.write_bytes(changed)
    elif how == "cut":
        victim.write_bytes(held[: draw.randrange(len(held))])
    elif how == "grow":
        victim.write_bytes(held + bytes(draw.randrange(1, 600)))
    elif how == "swap":
        victim.write_bytes(draw.choice(sorted(folder.glob(f"*{victim.suffix}"))).read_bytes())
    elif victim.suffix != ".json":  # without its card a folder is what it is
        victim.unlink()
        if how == "delete shard":
            victim.with_suffix({".tar": ".index", ".index": ".tar"}[victim.suffix]).unlink()
    return f"{how} {victim.name}"


def attack(count: int, folder: Path, seed: int) -> dict[str, int]:
    with ShardWriter(folder / "whole", kind=TEXT, max_samples=4) as writer:
        for i in range(12):
            writer.write(text_sample(i))
    truth, found = read(folder / "whole"), {"unchanged": 0, "refused": 0}
    for i in range(count):
        draw = random.Random(f"{seed}/{i}")
        shutil.copytree(folder / "whole", folder / "attacked")
        did = damage(folder / "attacked", draw)
        try:
            assert read(folder / "attacked") == truth, f"silently changed by: {did}"
            found["unchanged"] += 1
        except ShardError as error:
            assert any(part in str(error) for part in ("shard-", "dataset.json")), str(error)
            found["refused"] += 1
        shutil.rmtree(folder / "attacked")
    return found


def test_shards(tmp_path: Path) -> None:
    assert attack(40, tmp_path, SEED)["refused"] >= 20


@pytest.mark.full
def test_all_shards(tmp_path: Path) -> None:
    found = attack(400, tmp_path, SEED + 1)
    print(found)
    assert found["refused"] >= 200
