"""Exports under attack: flips, cuts and deletions in a proven folder. Every reader refuses it by name, or reads the
proven weights.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

from terrella.core.errors import TerrellaError
from terrella.models.folder import HFFolder, verify_export
from terrella.tests.models.test_folder import export, read_all

SEED = 20260917


def attack(count: int, folder: Path, seed: int) -> int:
    whole, refused = export("qwen2", folder / "whole"), 0
    for i in range(count):
        draw = random.Random(f"{seed}/{i}")
        attacked = Path(shutil.copytree(whole, folder / f"attacked-{i}"))
        victim = draw.choice(sorted(p for p in attacked.iterdir() if p.name != "export_proof.json"))
        held, how = victim.read_bytes(), draw.choice(["flip", "flip", "cut", "delete"])
        if how == "flip":
            changed = bytearray(held)
            changed[draw.randrange(len(held))] ^= 1 << draw.randrange(8)
            victim.write_bytes(changed)
        elif how == "cut":
            victim.write_bytes(held[: draw.randrange(len(held))])
        else:
            victim.unlink()
        for use in (read_all, verify_export):
            try:
                use(attacked)
            except TerrellaError as error:
                assert attacked.name in str(error)
                refused += 1
            else:  # what says nothing of the weights, such as the header's own remarks
                theirs, ours = HFFolder(attacked), HFFolder(whole)
                assert all(torch.equal(theirs.get(name), ours.get(name)) for name in ours.names()), (
                    f"silently changed: {how} {victim.name}"
                )
        shutil.rmtree(attacked)
    return refused


def test_exports(tmp_path: Path) -> None:
    assert attack(12, tmp_path, SEED) >= 20


@pytest.mark.full
def test_all_exports(tmp_path: Path) -> None:
    assert attack(100, tmp_path, SEED + 1) >= 190
