"""The engine's rules: what is refused, what is reported, what survives."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from terrella.core.config import OptimizerConfig, ParallelConfig, PrecisionConfig, check_layout, learning_rate
from terrella.core.errors import ConfigError
from terrella.tests.parallel.pool import run_ranks

JOBS = "terrella.tests.core.engine_jobs"
MODEL = {"layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "experts": 0, "vocab": 64}


@pytest.mark.parametrize(
    ("parallel", "world", "model", "message"),
    [
        ({"tensor": 3}, 4, {}, "does not divide the 4 ranks"),
        ({"tensor": 4}, 4, {"heads": 14}, r"4 does not divide the model's heads \(14\)"),
        ({"tensor": 2}, 2, {"heads": 6, "kv_heads": 3}, r"kv_heads \(3\).*no multiple of 3 either"),
        ({"tensor": 6}, 6, {"heads": 12, "vocab": 66}, r"kv_heads \(2\).*does not divide the 128 rows"),
        ({"pipeline": 3}, 3, {}, "does not divide the 4 layers"),
        ({"pipeline": 2, "virtual_pipeline": 4}, 2, {}, "virtual_pipeline 4"),
        ({"expert": 2}, 2, {}, "has no experts"),
        ({"expert": 2}, 2, {"experts": 3}, "model's 3 experts"),
        ({"expert": 2}, 3, {"experts": 4}, "3 ranks of a pipeline stage"),
        ({"tensor": 2}, 2, {"experts": 4}, "sequence_parallel"),
        ({"tensor": 2}, 2, {"vocab": 65}, "padded vocabulary"),
    ],
)
def test_layouts_that_cannot_be(parallel: dict, world: int, model: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_layout(ParallelConfig(**parallel), world=world, **{**MODEL, **model})


@pytest.mark.parametrize(("heads", "kv_heads", "tensor"), [(4, 2, 4), (4, 1, 2), (12, 2, 4), (64, 8, 16), (14, 2, 2)])
def test_layouts_that_can_be(heads: int, kv_heads: int, tensor: int) -> None:
    """Also with more ranks than key heads."""
    check_layout(ParallelConfig(tensor=tensor), world=tensor, **{**MODEL, "heads": heads, "kv_heads": kv_heads})


def test_settings_that_cannot_be() -> None:
    for kind, values, message in (
        (ParallelConfig, {"virtual_pipeline": 2}, "virtual_pipeline: needs pipeline"),
        (ParallelConfig, {"sequence_parallel": True}, "sequence_parallel: needs tensor"),
        (ParallelConfig, {"tensor": 0}, "tensor: must be at least 1"),
        (ParallelConfig, {"cuda_graphs": True, "tensor": 2}, "cuda_graphs: needs tensor"),
        (ParallelConfig, {"cuda_graphs": True, "recompute": "full"}, "recompute: none"),
        (OptimizerConfig, {"schedule": "cosine"}, "total_steps"),
        (OptimizerConfig, {"min_lr": 1.0}, "min_lr"),
        (PrecisionConfig, {"fp8": True, "layers": "te"}, "fp8: needs params: bf16"),
        (PrecisionConfig, {"fp8": True}, "fp8: needs params: bf16"),
        (PrecisionConfig, {"fp8_skip": -1}, "fp8_skip: must not"),
        (PrecisionConfig, {"fp8_products": "all"}, "fp8_products, fp8_skip, fp8_head: need fp8"),
        (PrecisionConfig, {"fp8_head": True}, "fp8_products, fp8_skip, fp8_head: need fp8"),
    ):
        with pytest.raises(ValueError, match=message):
            kind(**values)


def test_learning_rates() -> None:
    cosine = OptimizerConfig(lr=2.0, schedule="cosine", warmup_steps=4, total_steps=14, min_lr=1.0)
    assert [learning_rate(cosine, i) for i in (0, 1, 3, 4, 9, 14, 99)] == pytest.approx(
        [0.5, 1.0, 2.0, 2.0, 1.5, 1.0, 1.0]
    )
    linear = OptimizerConfig(lr=2.0, schedule="linear", total_steps=4)
    assert [learning_rate(linear, i) for i in range(6)] == [2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    assert learning_rate(OptimizerConfig(lr=3.0, warmup_steps=3), 1) == 2.0
    assert run_ranks(f"{JOBS}:schedule", 1)[0] == pytest.approx([0.5, 1.0, 1.0])


def test_a_step_that_is_not_a_number_changes_nothing() -> None:
    for result in run_ranks(f"{JOBS}:nan_step", 2):
        assert result["skipped"] and result["same"] and not result["after"]
        assert math.isnan(result["norm"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_offload_and_reload(precision: str) -> None:
    for result in run_ranks(f"{JOBS}:offloaded", 2, precision=precision):
        assert result["plain"] == result["parked"]


def test_refusals() -> None:
    first, second = run_ranks(f"{JOBS}:refusals", 2)
    assert "can only score" in first["no optimizer"]
    assert "at least one" in first["nothing"]
    assert "same layout" in first["other layout"]
    assert torch.cuda.is_available() or "precision.layers: 'te' needs TransformerEngine and a GPU" in first["no GPU"]
    assert "different metric names" in first["names"] and "different metric names" in second["names"]


def test_two_engines_share_a_process() -> None:
    assert run_ranks(f"{JOBS}:two_engines", 1)[0]


def test_bf16_parameters_are_rounded_masters() -> None:
    assert all(worst > 0 for worst in run_ranks(f"{JOBS}:masters", 2))


def test_profile_writes_a_trace(tmp_path: Path) -> None:
    run_ranks(f"{JOBS}:profiled", 1, folder=str(tmp_path))
    events = json.loads((tmp_path / "rank-0.json").read_text())["traceEvents"]
    assert any(event.get("name") == "step" for event in events)


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", 1e-6), ("bf16", 2e-3)])
def test_the_kernel_updates_as_torch_does(precision: str, allowed: float) -> None:
    assert max(run_ranks(f"{JOBS}:kernel_update", 2, precision=precision)) <= allowed


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_kernel_goes_on_from_a_checkpoint(tmp_path: Path, precision: str) -> None:
    assert all(run_ranks(f"{JOBS}:kernel_resumes", 2, folder=str(tmp_path / "saved"), precision=precision))


def test_profile_is_asked_for_by_the_environment(tmp_path: Path) -> None:
    run_ranks(f"{JOBS}:profiled_by_environment", 1, folder=str(tmp_path))
    events = json.loads((tmp_path / "rank-0.json").read_text())["traceEvents"]
    assert {"step", "forward and backward", "update"} <= {event.get("name") for event in events}
