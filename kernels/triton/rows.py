"""Triton side of kernels/rows.py: every row is read once, nothing in between is written.

Shape suffixes: N rows, H their width, T sums, K rows of one sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import cdiv, power_of_2


@triton.jit
def _sum_rows_kernel(x_ptr, row_ptr, out_ptr, H, K: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = o < H
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_ptr + t * K + k).to(tl.int64)
        total += tl.load(x_ptr + row * H + o, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * H + o, total.to(out_ptr.dtype.element_ty), mask=ok)


def triton_sum_rows(x_NH: torch.Tensor, row_TK: torch.Tensor) -> torch.Tensor:
    """See `sum_rows`."""
    x, row = x_NH.contiguous(), row_TK.contiguous()
    (count, per_sum), width = row.shape, x.shape[1]
    out = x.new_empty((count, width))
    if count:
        block = min(1024, power_of_2(width))
        _sum_rows_kernel[(count, cdiv(width, block))](x, row, out, width, K=per_sum, BLOCK=block, num_warps=4)
    return out
