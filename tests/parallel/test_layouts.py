"""Every layout against one rank: loss, gradient norm, per-tensor gradients and scores."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from terrella.tests.parallel.pool import run_ranks

ROWS = {
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "tp2_pp2": (4, {"tensor": 2, "pipeline": 2}),
    "dp2": (2, {}),
    "dp4": (4, {}),
    "vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "sp": (2, {"tensor": 2, "sequence_parallel": True}),
    "cp2": (2, {"context": 2}),
    "tp2_sp_cp2": (4, {"tensor": 2, "sequence_parallel": True, "context": 2}),
    "tp2_dp2": (4, {"tensor": 2}),
    "recompute": (1, {"recompute": "full"}),
}
TOLERANCE = 2e-6


@cache
def measure(world: int, packed: bool, parallel: tuple = ()) -> dict:
    return run_ranks("terrella.tests.parallel.jobs:measure", world, parallel=dict(parallel), packed=packed)[0]


def compare(reference: dict, other: dict) -> None:
    norm = reference["norm"]
    assert abs(other["metrics"]["loss"] - reference["metrics"]["loss"]) <= TOLERANCE * abs(reference["metrics"]["loss"])
    assert other["metrics"]["tokens"] == reference["metrics"]["tokens"]
    assert abs(other["norm"] - norm) <= TOLERANCE * norm
    assert other["gradients"].keys() == reference["gradients"].keys()
    for name, gradient in reference["gradients"].items():
        error = (other["gradients"][name] - gradient).norm() / max(gradient.norm(), 1e-3 * norm)
        assert error <= TOLERANCE, f"{name}: gradient off by {error:.2e}"
    torch.testing.assert_close(other["scores"], reference["scores"], atol=2e-6, rtol=0)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "even"])
@pytest.mark.parametrize("row", ROWS)
def test_layout(row: str, packed: bool) -> None:
    world, parallel = ROWS[row]
    compare(measure(1, packed), measure(world, packed, tuple(parallel.items())))
