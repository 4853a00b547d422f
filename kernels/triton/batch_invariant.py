"""Triton side of kernels/batch_invariant.py: one tile for every shape.

Shape suffixes: M rows, K inner dimension, N columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import cdiv


@triton.jit(do_not_specialize=["M"])  # one binary whatever the number of rows
def _matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a_ptrs = a_ptr + m[:, None] * stride_am + k[None, :] * stride_ak
    b_ptrs = b_ptr + k[:, None] * stride_bk + n[None, :] * stride_bn
    acc = tl.zeros([BM, BN], tl.float32)
    for at in range(0, K, BK):
        inside = at + k < K
        a = tl.load(a_ptrs, mask=(m < M)[:, None] & inside[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=inside[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += BK * stride_ak
        b_ptrs += BK * stride_bk
    tl.store(
        c_ptr + m[:, None] * stride_cm + n[None, :],
        acc.to(c_ptr.dtype.element_ty),
        mask=(m < M)[:, None] & (n < N)[None, :],
    )


def triton_matmul(a_MK: torch.Tensor, b_KN: torch.Tensor, out_MN: torch.Tensor | None) -> torch.Tensor:
    """See `matmul`."""
    (M, K), N = a_MK.shape, b_KN.shape[1]
    if a_MK.stride(1) != 1:
        a_MK = a_MK.contiguous()  # one order of strides, one binary
    if out_MN is None:
        out_MN = torch.empty((M, N), dtype=a_MK.dtype, device=a_MK.device)
    if M:
        _matmul_kernel[(cdiv(N, 128), cdiv(M, 64))](
            a_MK, b_KN, out_MN, M, N, K, a_MK.stride(0), 1, b_KN.stride(0), b_KN.stride(1), out_MN.stride(0), BM=64,
            BN=128, BK=64,
            PRECISION="ieee" if a_MK.dtype == torch.float32 else "tf32", num_warps=4, num_stages=3,
        )  # fmt: skip
    return out_MN
