"""Attention of packed documents on a GPU, by every kernel that is there, against fp64 written out in full."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from terrella.core.layout import context_rows, document_layout
from terrella.models import attention, varlen_attention
from terrella.models.attention import packed_attention
from terrella.tests.core.attention_reference import full_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("lengths", [[64, 64, 64], [100, 28, 1, 63], [192]], ids=["even", "ragged", "one"])
@pytest.mark.parametrize("heads", [(4, 4), (12, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kernel", ["flash", "varlen", "by_length", "chosen"])
def test_packed_attention(lengths: list[int], heads: tuple[int, int], ranks: int, kernel: str, monkeypatch) -> None:
    if kernel == "flash" and (varlen_attention.flash_function() is None or torch.cuda.get_device_capability() < (9, 0)):
        pytest.skip("needs FlashAttention-4 and a Hopper GPU or newer")
    monkeypatch.setattr(varlen_attention, "_chosen", {})
    if kernel != "chosen":
        attend = attention._by_length if kernel == "by_length" else getattr(varlen_attention, kernel)
        monkeypatch.setattr(varlen_attention, "choose", lambda *_: attend)
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    draw = torch.Generator().manual_seed(1)
    wide = [
        torch.randn(bounds[-1], h, 64, generator=draw, dtype=torch.float64).bfloat16().double()
        for h in (heads[0], heads[1], heads[1])
    ]
    for x in wide:
        x.requires_grad_()
    expected = full_attention(*wide, bounds)
    for rank in range(ranks):
        rows = context_rows(bounds[-1], ranks, rank)
        layout = replace(document_layout(bounds, ranks, rank), k_order_S=None).to(torch.device("cuda"))
        narrow = [x.detach().bfloat16().cuda().requires_grad_() for x in (wide[0][rows], wide[1], wide[2])]
        got = packed_attention(*narrow, layout)
        torch.testing.assert_close(got.double().cpu(), expected[rows].detach(), atol=2e-2, rtol=2e-2)
        upstream = torch.randn(expected[rows].shape, generator=draw, dtype=torch.float64).bfloat16().double()
        grads = torch.autograd.grad(expected[rows], wide, upstream, retain_graph=True)
        got.backward(upstream.bfloat16().cuda())
        for index, (mine, whole) in enumerate(zip(narrow, grads, strict=True)):
            assert mine.grad is not None
            reference = whole[rows] if index == 0 else whole
            error = (mine.grad.double().cpu() - reference).norm() / reference.norm()
            assert error < 2e-2, f"gradient {index} off by {error:.2e}"
