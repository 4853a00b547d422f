"""Sums of a few rows each: how the outputs of a token's experts come together again.

Shape suffixes: N rows, H their width, T sums, K rows of one sum.
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
