"""Our fp8 layers on a GPU: a layer of the 1.5B and of the 8B model against the same layer in bf16 and fp32, the kernels
that a step launches, and training, graphs and resume through the engine.

What the bounds come from is in test_fp8.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from terrella.models import fp8, fused_layer
from terrella.tests.models.test_fp8 import PRODUCT
from terrella.tests.parallel.jobs import WIDE
from terrella.tests.parallel.pool import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with fp8"
    ),
]
SIZES = {"1.5B": (1536, 2048, 1536, 8960), "8B": (4096, 6144, 4096, 14336)}  # hidden, to heads, from heads, ffn
NAMES = ("x", "attended", "qkv", "first norm", "out", "second norm", "up", "down")


def draw(size: str, tokens: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(inputs and weights of both halves, gradients of their outputs), fp32, as large as training has them."""
    torch.manual_seed(0)
    hidden, columns, attended, ffn = SIZES[size]
    shapes = [(tokens, hidden), (tokens, attended), (columns, hidden), (hidden,), (hidden, attended), (hidden,)]
    shapes += [(2 * ffn, hidden), (hidden, ffn)]
    scales = [1.0, 1.0, hidden**-0.5, 0.0, attended**-0.5, 0.0, hidden**-0.5, ffn**-0.5]
    made = [torch.randn(s, device="cuda") * k + (k == 0.0) for s, k in zip(shapes, scales, strict=True)]
    grads = [torch.randn(tokens, n, device="cuda") * 1e-5 for n in (columns, hidden)]
    return made, grads


def run(made: list[torch.Tensor], grads: list[torch.Tensor], dtype: torch.dtype, low: Any) -> list[torch.Tensor]:
    """Outputs and gradients of both halves, the first one's residual going to the second."""
    x, attended, qkv, first, out, second, up, down = leaves = [t.to(dtype).requires_grad_() for t in made]
    extra = () if low is None else (low,)
    module: Any = fused_layer if low is None else fp8
    if low is not None:
        for place, weight in zip((low.qkv, low.out, low.up, low.down), (qkv, out, up, down), strict=True):
            place.cast(weight)
    heads, residual = module.before_attention(x, first, qkv, 1e-6, *extra)
    result = module.after_attention(attended, residual, out, second, up, down, 1e-6, *extra)
    found = torch.autograd.grad((heads, result), leaves, [g.to(dtype) for g in grads])
    return [heads.detach(), result.detach(), *found]


@pytest.mark.parametrize("products", ["forward", "dgrad", "all"])
@pytest.mark.parametrize("size", list(SIZES))
def test_a_layer_is_near_fp32_by_the_formats_rounding(size: str, products: Any) -> None:
    """One layer: a result has passed at most 7 rounded products (four forward, three back); bf16 has 2^-9 of each."""
    made, grads = draw(size, 2048)
    torch.backends.cuda.matmul.allow_tf32 = False
    exact = run(made, grads, torch.float32, None)
    bf16 = run(made, grads, torch.bfloat16, None)
    low = run(made, grads, torch.bfloat16, fp8.LayerWeights(products))
    for name, want, plain, got in zip(("heads", "result", *NAMES), exact, bf16, low, strict=True):
        error, base = (float((t.float() - want).norm() / want.norm()) for t in (got, plain))
        print(f"{size} {products} {name}: fp8 {error:.2e}, bf16 {base:.2e}")
        assert error <= 7**0.5 * PRODUCT + 4 * base, name
    assert (low[0].float() - exact[0]).norm() >= 1e-2 * exact[0].norm()  # fp8 indeed


@pytest.mark.parametrize("products,count", [("forward", 4), ("dgrad", 8), ("all", 12)])
def test_a_step_launches_the_products(products: Any, count: int) -> None:
    made, grads = draw("1.5B", 256)
    low = fp8.LayerWeights(products)
    run(made, grads, torch.bfloat16, low)
    with torch.profiler.profile() as profile:
        run(made, grads, torch.bfloat16, low)
        torch.cuda.synchronize()
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls.get("aten::_scaled_mm") == count


@pytest.mark.parametrize("products,head", [("forward", False), ("dgrad", False), ("all", False), ("all", True)])
def test_it_learns_as_bf16_does(products: str, head: str) -> None:
    job, common = "terrella.tests.parallel.jobs:measure_wide", {"layers": "ours", "steps": 20, "vocab": 1008}
    few = run_ranks(job, 1, fp8=True, fp8_products=products, fp8_head=head, **common)[0]
    plain = run_ranks(job, 1, **common)[0]
    assert 0 < abs(few["loss"] / plain["loss"] - 1) <= 2e-2
    for name, value in plain["gradients"].items():
        error = (few["gradients"][name] - value).norm() / max(value.norm(), 1e-3 * plain["norm"])
        assert error <= PRODUCT * (8 * WIDE.layers) ** 0.5, f"{name}: gradient off by {error:.2e}"
    assert plain["losses"][-1] < 0.7 * plain["losses"][0]
    assert abs(few["losses"][-1] / plain["losses"][-1] - 1) <= 0.1


@pytest.mark.parametrize("precision", ["fp8", "fp8 all", "fp8 head"])
def test_resume_is_bit_equal(tmp_path: Path, precision: str) -> None:
    common = {"folder": str(tmp_path / "step_00000003"), "parallel": {}, "precision": precision, "total": 6}
    jobs = "terrella.tests.core.checkpoint_jobs"
    whole = run_ranks(f"{jobs}:train_and_save", 1, at=3, **common)[0]
    again = run_ranks(f"{jobs}:resume", 1, **common)[0]
    assert again["trace"] == whole["trace"][3:]
    for name, value in whole["states"].items():
        assert torch.equal(value.view(torch.uint8), again["states"][name].view(torch.uint8)), name


def test_graphs_change_nothing() -> None:
    """Replayed layers read the copies of the weights as they are after each update."""
    plain, graphed = (
        run_ranks("terrella.tests.models.fp8_jobs:trained", 1, graphs=graphs)[0] for graphs in (False, True)
    )
    assert graphed["captured"] > 0 and plain["losses"] == graphed["losses"]
