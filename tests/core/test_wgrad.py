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
