"""Rows sorted by expert, and sums of a few rows each: how tokens go to their experts and the outputs come together
again.

Shape suffixes: N rows, H their width, T tokens or sums, E experts, K experts of one token, which are the rows of one
sum.
"""

from __future__ import annotations

import torch

from .dispatch import use_triton


def reference_sum_rows(x_NH: torch.Tensor, row_TK: torch.Tensor) -> torch.Tensor:
    """Plain torch, added up in fp32 (fp64 stays)."""
    return x_NH.index_select(0, row_TK.reshape(-1)).view(*row_TK.shape, x_NH.shape[1]).sum(1)


def sum_rows(x_NH: torch.Tensor, row_TK: torch.Tensor) -> torch.Tensor:
    """out[t] = sum over k of x[row[t, k]], rounded once; not differentiable."""
    if use_triton(x_NH):
        from .triton.rows import triton_sum_rows

        return triton_sum_rows(x_NH, row_TK)
    return reference_sum_rows(x_NH, row_TK)


def row_order(map_TE: torch.Tensor, per_token: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token and expert of every row (N, N), rows sorted by expert and then by token, and the rows of every token (T,
    K).

    Every token has `per_token` experts, so that all sizes are known beforehand and the host does not ask the device for
    them.
    """
    tokens, rows = len(map_TE), len(map_TE) * per_token
    chosen = map_TE.T.reshape(-1)
    row = (chosen.cumsum(0) - 1).masked_fill(~chosen, rows)  # what nobody chose goes to a place behind the end
    place_N = row.new_empty(rows + 1).scatter_(0, row, torch.arange(len(row), device=row.device))[:rows]
    token_N = place_N % tokens
    return token_N, place_N // tokens, token_N.argsort(stable=True).view(tokens, per_token)
