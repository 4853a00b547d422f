"""One rank under NCCL: our layers in bf16, TransformerEngine's in bf16 and fp8, against fp32; resume equal to the
bit.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import pytest
import torch

from terrella.tests.models.graph_jobs import check_graphs
from terrella.tests.parallel.pool import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
needs_te = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="TransformerEngine is not installed"
)


@cache
def measure(layers: str, precision: str = "bf16", fp8: bool = False, packed: bool = True, steps: int = 1) -> dict:
    job = "terrella.tests.parallel.jobs:measure_wide"
    return run_ranks(job, 1, layers=layers, precision=precision, fp8=fp8, packed=packed, steps=steps)[0]


def compare(other: dict, packed: bool, loss: float, gradient: float) -> None:
    """Against our layers in fp32: the loss, and every gradient relative to its own size."""
    exact = measure("ours", "fp32", packed=packed)
    assert abs(other["loss"] / exact["loss"] - 1) <= loss
    assert other["gradients"].keys() == exact["gradients"].keys()
    for name, value in exact["gradients"].items():
        error = (other["gradients"][name] - value).norm() / max(value.norm(), 1e-3 * exact["norm"])
        assert error <= gradient, f"{name}: gradient off by {error:.2e}"


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "even"])
def test_our_layers_in_bf16(packed: bool) -> None:
    compare(measure("ours", packed=packed), packed, loss=1e-3, gradient=3e-2)


@pytest.mark.parametrize("packed,lora", [(True, False), (False, False), (False, True)], ids=["packed", "even", "lora"])
def test_graphs_change_nothing(packed: bool, lora: bool, tmp_path: Path) -> None:
    """Captured in the middle of training, and again after an offload: every loss, gradient norm and weight stays
    what it is without.
    """
    check_graphs(packed, lora, tmp_path)


@needs_te
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "even"])
def test_transformer_engine_in_bf16(packed: bool) -> None:
    compare(measure("te", packed=packed), packed, loss=1e-3, gradient=3e-2)


@needs_te
def test_transformer_engine_in_fp8_learns_alike() -> None:
    """fp8 rounds to three bits: its gradients are near, and twenty steps bring the loss down as bf16's do."""
    few, exact = measure("te", fp8=True, steps=20), measure("ours", steps=20)
    compare(few, True, loss=2e-2, gradient=0.3)
    assert exact["losses"][-1] < 0.7 * exact["losses"][0]
    assert abs(few["losses"][-1] / exact["losses"][-1] - 1) <= 0.1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resume_is_bit_equal(tmp_path: Path, precision: str) -> None:
    common = {"folder": str(tmp_path / "step_00000003"), "parallel": {}, "precision": precision, "total": 8}
    jobs = "terrella.tests.core.checkpoint_jobs"
    whole = run_ranks(f"{jobs}:train_and_save", 1, at=3, **common)[0]
    again = run_ranks(f"{jobs}:resume", 1, **common)[0]
    assert again["trace"] == whole["trace"][3:]
    for name, value in whole["states"].items():
        assert torch.equal(value.view(torch.uint8), again["states"][name].view(torch.uint8)), name
