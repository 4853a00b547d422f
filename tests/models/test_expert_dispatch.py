"""Tokens to experts and back within one rank, against a table written out by hand and sums in a loop."""

from __future__ import annotations

import pytest
import torch

from terrella.models.expert_dispatch import _ToRows, _ToTokens, row_order

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_rows_are_sorted_by_expert_then_token() -> None:
    chosen = torch.tensor([[True, False, False, True], [False, False, True, True], [True, False, False, True]])
    token_N, expert_N, row_TK = row_order(chosen, 2)
    # expert 0: tokens 0, 2; expert 1: none; expert 2: token 1; expert 3: tokens 0, 1, 2
    assert token_N.tolist() == [0, 2, 1, 0, 1, 2]
    assert expert_N.tolist() == [0, 0, 2, 3, 3, 3]
    assert row_TK.tolist() == [[0, 3], [2, 4], [1, 5]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)], ids=["fp32", "bf16"])
def test_there_and_back(dtype: torch.dtype, tolerance: float, device: str) -> None:
    draw = torch.Generator().manual_seed(2)
    tokens, experts, per_token, hidden = 50, 6, 3, 16
    chosen = torch.zeros(tokens, experts, dtype=torch.bool)
    chosen.scatter_(1, torch.rand(tokens, experts, generator=draw).topk(per_token).indices, True)
    x = torch.randn(tokens, hidden, generator=draw).to(device, dtype).requires_grad_()
    scale = torch.randn(tokens * per_token, hidden, generator=draw).to(device, dtype)
    upstream = torch.randn(tokens, hidden, generator=draw).to(device, dtype)
    token_N, _, row_TK = row_order(chosen.to(device), per_token)
    out = _ToTokens.apply(_ToRows.apply(x, row_TK, token_N) * scale, row_TK, token_N)
    out.backward(upstream)
    places = chosen.T.nonzero()[:, 1]  # the token of every row, expert after expert
    assert torch.equal(token_N.cpu(), places)
    factor = torch.zeros(tokens, hidden, dtype=torch.float64).index_add_(0, places, scale.double().cpu())
    for got, want in ((out, factor * x.detach().double().cpu()), (x.grad, factor * upstream.double().cpu())):
        assert got.dtype == dtype and (got.double().cpu() - want).norm() <= tolerance * want.norm()
