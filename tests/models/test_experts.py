"""Grouped experts against the sequential law, one expert after the other through plain products: outputs and every
gradient.
"""

from __future__ import annotations

import pytest
import torch

from terrella.models.experts import grouped_experts
from terrella.tests.parallel.pool import run_ranks

HIDDEN, WIDTH = 32, 24
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
COUNTS = {
    "uneven": [5, 0, 9, 1],
    "first and last empty": [0, 7, 3, 0],
    "one expert has all": [0, 0, 13, 0],
    "no rows": [0, 0, 0, 0],
}


def sequential(x, probs, counts, fc1, fc2):
    """Megatron's law: the probability scales the gated product, before the second projection."""
    out = []
    for rows, scale, w1, w2 in zip(x.split(counts), probs.split(counts), fc1, fc2, strict=True):
        gate, up = (rows @ w1.T).chunk(2, -1)
        out.append((torch.nn.functional.silu(gate) * up * scale[:, None]) @ w2.T)
    return torch.cat(out)


def drawn(counts: list[int], dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor, list, list]:
    """Inputs in `dtype`, the probabilities in fp32 as the router gives them."""
    draw = torch.Generator().manual_seed(5)
    rows = sum(counts)
    x = torch.randn(rows, HIDDEN, generator=draw).to(device, dtype).requires_grad_()
    probs = torch.rand(rows, generator=draw).to(device).requires_grad_()
    fc1 = [(torch.randn(2 * WIDTH, HIDDEN, generator=draw) / 4).to(device, dtype).requires_grad_() for _ in counts]
    fc2 = [(torch.randn(HIDDEN, WIDTH, generator=draw) / 4).to(device, dtype).requires_grad_() for _ in counts]
    return x, probs, fc1, fc2


def exact(inputs: tuple, counts: list[int], upstream: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output and gradients of the sequential law in fp64."""
    x, probs, fc1, fc2 = inputs
    wide = [t.detach().double().requires_grad_() for t in (x, probs, *fc1, *fc2)]
    out = sequential(wide[0], wide[1], counts, wide[2 : 2 + len(counts)], wide[2 + len(counts) :])
    return out, list(torch.autograd.grad(out, wide, upstream.double()))


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    return got.shape == want.shape and bool((got.double() - want).norm() <= tolerance * want.norm())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
@pytest.mark.parametrize("buffers", [False, True], ids=["returned", "main_grad"])
def test_outputs_and_gradients(
    counts: list[int], dtype: torch.dtype, tolerance: float, buffers: bool, device: str
) -> None:
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("the grouped product of CUDA takes bf16")
    inputs = x, probs, fc1, fc2 = drawn(counts, dtype, device)
    weights = [*fc1, *fc2]
    if buffers:
        for weight in weights:
            weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    out = grouped_experts(x, probs, torch.tensor(counts, device=device), fc1, fc2)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(6)).to(device, dtype)
    want, gradients = exact(inputs, counts, upstream)
    assert out.dtype == dtype and near(out, want, tolerance)
    out.backward(upstream)
    for leaf, gradient in zip((x, probs), gradients, strict=False):
        assert leaf.grad is not None and leaf.grad.dtype == leaf.dtype and near(leaf.grad, gradient, tolerance)
    for weight, gradient in zip(weights, gradients[2:], strict=True):
        if buffers:
            assert weight.grad_added_to_main_grad
            assert near(weight.main_grad - 1.0, gradient, tolerance)
        else:
            assert near(weight.grad, gradient, tolerance)


def test_frozen_experts_still_pass_gradients_on() -> None:
    counts = COUNTS["uneven"]
    inputs = x, probs, fc1, fc2 = drawn(counts, torch.float32, "cpu")
    for weight in (*fc1, *fc2):
        weight.requires_grad_(False)
        weight.main_grad = torch.zeros_like(weight)
    out = grouped_experts(x, probs, torch.tensor(counts), fc1, fc2)
    out.sum().backward()
    _, gradients = exact(inputs, counts, torch.ones_like(out))
    assert near(x.grad, gradients[0], 1e-6) and near(probs.grad, gradients[1], 1e-6)
    assert not any(weight.main_grad.any() or weight.grad is not None for weight in (*fc1, *fc2))


def test_counts_that_are_not_the_rows_are_refused() -> None:
    x, probs, fc1, fc2 = drawn([3, 2], torch.float32, "cpu")
    with pytest.raises(ValueError, match="5 rows for experts that were given 6"):
        grouped_experts(x, probs, torch.tensor([3, 3]), fc1, fc2)


def measure(grouped: bool, world: int = 1, parallel: dict | None = None, **changes) -> dict:
    return run_ranks(
        "terrella.tests.parallel.jobs:measure_experts", world, grouped=grouped, parallel=parallel or {}, **changes
    )[0]


def compare(got: dict, want: dict, loss: float, gradient: float) -> None:
    """The loss, and every gradient relative to its own size."""
    assert abs(got["loss"] / want["loss"] - 1) <= loss
    assert got["gradients"].keys() == want["gradients"].keys()
    for name, value in want["gradients"].items():
        error = (got["gradients"][name] - value).norm() / max(value.norm(), 1e-3 * want["norm"])
        assert error <= gradient, f"{name}: gradient off by {error:.2e}"


# world, layout, passes through an expert layer: two layers, four microbatches shared by the data ranks, two times over
ENGINES = {
    "one": (1, {}, 16),
    "recompute": (1, {"recompute": "full"}, 32),
    "ep2": (2, {"expert": 2}, 8),
    "dp2_overlap": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}, 8),
    "cut": (2, {"tensor": 2, "sequence_parallel": True}, 0),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="fp32 is grouped on CPU only")
@pytest.mark.parametrize("row", ENGINES)
def test_engine_in_fp32(row: str) -> None:
    """Against the sequential law on the same layout; experts that are cut over tensor ranks keep it."""
    world, parallel, passes = ENGINES[row]
    got, want = measure(True, world, parallel), measure(False, world, parallel)
    assert (got["calls"], want["calls"]) == (passes, 0)
    compare(got, want, 2e-6, 2e-6)
    for name, weight in want["weights"].items():
        torch.testing.assert_close(got["weights"][name], weight, atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_engine_in_bf16() -> None:
    """One layer, so that both laws route alike: the router's input is the same to the bit."""
    got, want = measure(True, precision="bf16", layers=1), measure(False, precision="bf16", layers=1)
    assert (got["calls"], want["calls"]) == (8, 0)
    compare(got, want, 1e-3, 1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_engine_in_bf16_against_fp32() -> None:
    """Every token goes to all experts, so that rounding cannot change its route."""
    got = measure(True, precision="bf16", experts_per_token=8)
    assert got["calls"] == 16
    compare(got, measure(False, experts_per_token=8), 1e-3, 3e-2)
