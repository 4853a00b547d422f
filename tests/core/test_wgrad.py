"""Which product adds weight gradients to their fp32 buffers: apex's where Megatron has it, torch's where it has not."""

from types import SimpleNamespace

import pytest
import torch

from terrella.core.mcore import wgrad


@pytest.mark.parametrize("installed", [True, False])
def test_apex_is_used_where_it_is_installed(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.tensor_parallel import layers

    calls: list[tuple[int, ...]] = []

    def theirs(inputs: torch.Tensor, grads: torch.Tensor, total: torch.Tensor) -> None:  # as apex declares it
        calls.append(tuple(total.shape))
        total.add_(grads.float().t() @ inputs.float())

    extension = SimpleNamespace(wgrad_gemm_accum_fp32=theirs) if installed else None
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", extension, raising=False)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", installed)
    wgrad.complete_megatron()
    assert layers._grad_accum_fusion_available
    inputs, grads, total = torch.randn(5, 3), torch.randn(5, 2), torch.ones(2, 3)
    wanted = total + grads.t() @ inputs
    layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(inputs, grads, total)
    torch.testing.assert_close(total, wanted)
    assert calls == ([(2, 3)] if installed else [])


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero", [False, True])
def test_the_first_product_of_a_step_may_write(kind: torch.dtype, zero: bool) -> None:
    inputs, grads = torch.randn(5, 3).to(kind), torch.randn(5, 2).to(kind)
    total = torch.zeros(2, 3) if zero else torch.ones(2, 3)
    wanted = total + (grads.t() @ inputs)
    wgrad.add_weight_grad(inputs, grads, total, zero)
    torch.testing.assert_close(total, wanted)


def test_a_buffer_is_zero_until_something_was_added() -> None:
    """Graphs add without saying so, and a weight that nobody keeps a record of may have been added to."""
    weight = torch.nn.Parameter(torch.ones(2, 3))
    assert not wgrad.is_zero(weight)
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    assert wgrad.is_zero(weight)
    weight.graphed = True  # type: ignore[attr-defined]
    assert not wgrad.is_zero(weight)
