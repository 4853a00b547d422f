"""Triton side of kernels/fp8.py.

By rows a program goes over its row twice: for the largest magnitude, then to cast; the second time the row is in cache.
By columns the largest magnitudes come first, in a launch of their own; a maximum does not depend on the order of the
programs, so that atomic operations keep every bit. Magnitudes are compared as the integers that their bits are: a
number that is none is the largest of all, and makes its whole row one.

Shape suffixes: N rows (tokens), K columns, F feed-forward width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import cdiv, power_of_2
from ..scaled import LARGEST, SMALLEST, Scaled, empty_scaled

STRIPE = 1024  # rows of a program that looks for the largest magnitudes


@triton.jit
def scales_of(largest, LARGEST: tl.constexpr, SMALLEST: tl.constexpr):
    """(scale, its inverse) of the bits of a largest magnitude, as the reference divides them: rounded once each."""
    largest = largest.to(tl.float32, bitcast=True)
    largest = tl.where(largest < SMALLEST, SMALLEST, largest)  # not what is no number
    return tl.div_rn(largest, LARGEST), tl.div_rn(tl.zeros_like(largest) + LARGEST, largest)


@triton.jit
def magnitude(x):
    """The bits of |x| in fp32, which order as magnitudes do; what is no number comes last."""
    return tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)


@triton.jit
def _rows_kernel(x_ptr, q_ptr, scale_ptr, K, BLOCK: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros([BLOCK], tl.int32)
    for start in range(0, K, BLOCK):
        o = start + tl.arange(0, BLOCK)
        most = tl.maximum(most, magnitude(tl.load(x_ptr + row * K + o, mask=o < K, other=0.0)))
    scale, inverse = scales_of(tl.max(most, 0), LARGEST, SMALLEST)
    tl.store(scale_ptr + row, scale)
    for start in range(0, K, BLOCK):
        o = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * K + o, mask=o < K, other=0.0).to(tl.float32)
        tl.store(q_ptr + row * K + o, (x * inverse).to(q_ptr.dtype.element_ty), mask=o < K)


@triton.jit
def _largest_kernel(
    x_ptr, most_ptr, row_most_ptr, N, K,
    BOTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STRIPE: tl.constexpr,
):  # fmt: skip
    k = (tl.program_id(0) * COLS + tl.arange(0, COLS))[None, :]
    first = tl.program_id(1).to(tl.int64) * STRIPE
    most = tl.zeros([ROWS, COLS], tl.int32)
    for start in range(0, tl.minimum(STRIPE, N - first), ROWS):
        n = first + start + tl.arange(0, ROWS)[:, None]
        x = magnitude(tl.load(x_ptr + n * K + k, mask=(n < N) & (k < K), other=0.0))
        most = tl.maximum(most, x)
        if BOTH:
            row = first + start + tl.arange(0, ROWS)
            tl.atomic_max(row_most_ptr + row, tl.max(x, 1), mask=row < N)
    o = tl.program_id(0) * COLS + tl.arange(0, COLS)
    tl.atomic_max(most_ptr + o, tl.max(most, 0), mask=o < K)


@triton.jit
def _columns_kernel(
    x_ptr, q_ptr, scale_ptr, most_ptr, row_q_ptr, row_scale_ptr, row_most_ptr, N, K,
    BOTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0) * COLS + tl.arange(0, COLS)
    n = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    scale, inverse = scales_of(tl.load(most_ptr + k, mask=k < K, other=0), LARGEST, SMALLEST)
    if tl.program_id(1) == 0:
        tl.store(scale_ptr + k, scale, mask=k < K)
    here, ok = n[:, None] * K + k[None, :], (n < N)[:, None] & (k < K)[None, :]
    x = tl.load(x_ptr + here, mask=ok, other=0.0).to(tl.float32)
    if BOTH:
        row_scale, row_inverse = scales_of(tl.load(row_most_ptr + n, mask=n < N, other=0), LARGEST, SMALLEST)
        if tl.program_id(0) == 0:
            tl.store(row_scale_ptr + n, row_scale, mask=n < N)
        tl.store(row_q_ptr + here, (x * row_inverse[:, None]).to(q_ptr.dtype.element_ty), mask=ok)
    q = (x * inverse[None, :]).to(q_ptr.dtype.element_ty)
    place = q_ptr + k.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(place, tl.trans(q), mask=(k < K)[:, None] & (n < N)[None, :])


@triton.jit
def _gate(x_ptr, dy_ptr, place, place_y, ok, F, BACKWARD: tl.constexpr):
    """(gradient of the gate, gradient of up, output) at some places, rounded to the input's type."""
    kind = x_ptr.dtype.element_ty
    gate = tl.load(x_ptr + place, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + place + F, mask=ok, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    y = (gate * s * up).to(kind)
    if BACKWARD:
        dy = tl.load(dy_ptr + place_y, mask=ok, other=0.0).to(tl.float32)
        return (dy * up * s * (1.0 + gate * (1.0 - s))).to(kind), (dy * gate * s).to(kind), y
    return y, y, y


@triton.jit
def _swiglu_rows_kernel(
    x_ptr, dy_ptr, q_ptr, scale_ptr, dx_ptr, y_ptr, F,
    BLOCK: tl.constexpr, BACKWARD: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros([BLOCK], tl.int32)
    for start in range(0, F, BLOCK):
        o = start + tl.arange(0, BLOCK)
        a, b, _ = _gate(x_ptr, dy_ptr, row * 2 * F + o, row * F + o, o < F, F, BACKWARD)
        most = tl.maximum(most, tl.maximum(magnitude(a), magnitude(b)))
    scale, inverse = scales_of(tl.max(most, 0), LARGEST, SMALLEST)
    tl.store(scale_ptr + row, scale)
    for start in range(0, F, BLOCK):
        o = start + tl.arange(0, BLOCK)
        ok = o < F
        a, b, y = _gate(x_ptr, dy_ptr, row * 2 * F + o, row * F + o, ok, F, BACKWARD)
        if BACKWARD:
            place = row * 2 * F + o
            tl.store(dx_ptr + place, a, mask=ok)
            tl.store(dx_ptr + place + F, b, mask=ok)
            tl.store(y_ptr + row * F + o, y, mask=ok)
            tl.store(q_ptr + place, (a.to(tl.float32) * inverse).to(q_ptr.dtype.element_ty), mask=ok)
            tl.store(q_ptr + place + F, (b.to(tl.float32) * inverse).to(q_ptr.dtype.element_ty), mask=ok)
        else:
            tl.store(q_ptr + row * F + o, (y.to(tl.float32) * inverse).to(q_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _swiglu_largest_kernel(
    x_ptr, dy_ptr, row_ptr, dx_ptr, y_ptr, N, F, ROWS: tl.constexpr, COLS: tl.constexpr, STRIPE: tl.constexpr
):
    o = tl.program_id(0) * COLS + tl.arange(0, COLS)
    first = tl.program_id(1).to(tl.int64) * STRIPE
    most_a = tl.zeros([ROWS, COLS], tl.int32)
    most_b = tl.zeros([ROWS, COLS], tl.int32)
    most_y = tl.zeros([ROWS, COLS], tl.int32)
    for start in range(0, tl.minimum(STRIPE, N - first), ROWS):
        n = first + start + tl.arange(0, ROWS)
        ok = (n < N)[:, None] & (o < F)[None, :]
        place = n[:, None] * 2 * F + o[None, :]
        a, b, y = _gate(x_ptr, dy_ptr, place, n[:, None] * F + o[None, :], ok, F, True)
        a, b = magnitude(a), magnitude(b)
        tl.atomic_max(row_ptr + n, tl.max(tl.maximum(a, b), 1), mask=n < N)
        most_a, most_b, most_y = tl.maximum(most_a, a), tl.maximum(most_b, b), tl.maximum(most_y, magnitude(y))
    tl.atomic_max(dx_ptr + o, tl.max(most_a, 0), mask=o < F)
    tl.atomic_max(dx_ptr + F + o, tl.max(most_b, 0), mask=o < F)
    tl.atomic_max(y_ptr + o, tl.max(most_y, 0), mask=o < F)


@triton.jit
def _swiglu_columns_kernel(
    x_ptr, dy_ptr, row_ptr, dxmost_ptr, ymost_ptr,
    rows_ptr, columns_ptr, y_ptr, rows_scale_ptr, columns_scale_ptr, y_scale_ptr, N, F,
    ROWS: tl.constexpr, COLS: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0) * COLS + tl.arange(0, COLS)
    n = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_scale, row_inverse = scales_of(tl.load(row_ptr + n, mask=n < N, other=0), LARGEST, SMALLEST)
    a_scale, a_inverse = scales_of(tl.load(dxmost_ptr + o, mask=o < F, other=0), LARGEST, SMALLEST)
    b_scale, b_inverse = scales_of(tl.load(dxmost_ptr + F + o, mask=o < F, other=0), LARGEST, SMALLEST)
    y_scale, y_inverse = scales_of(tl.load(ymost_ptr + o, mask=o < F, other=0), LARGEST, SMALLEST)
    if tl.program_id(0) == 0:
        tl.store(rows_scale_ptr + n, row_scale, mask=n < N)
    if tl.program_id(1) == 0:
        tl.store(columns_scale_ptr + o, a_scale, mask=o < F)
        tl.store(columns_scale_ptr + F + o, b_scale, mask=o < F)
        tl.store(y_scale_ptr + o, y_scale, mask=o < F)
    ok = (n < N)[:, None] & (o < F)[None, :]
    place = n[:, None] * 2 * F + o[None, :]
    a, b, y = _gate(x_ptr, dy_ptr, place, n[:, None] * F + o[None, :], ok, F, True)
    a, b, y = a.to(tl.float32), b.to(tl.float32), y.to(tl.float32)
    fp8 = rows_ptr.dtype.element_ty
    tl.store(rows_ptr + place, (a * row_inverse[:, None]).to(fp8), mask=ok)
    tl.store(rows_ptr + place + F, (b * row_inverse[:, None]).to(fp8), mask=ok)
    turned = (o < F)[:, None] & (n < N)[None, :]
    at = o.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(columns_ptr + at, tl.trans((a * a_inverse[None, :]).to(fp8)), mask=turned)
    tl.store(columns_ptr + F.to(tl.int64) * N + at, tl.trans((b * b_inverse[None, :]).to(fp8)), mask=turned)
    tl.store(y_ptr + at, tl.trans((y * y_inverse[None, :]).to(fp8)), mask=turned)


def triton_cast_rows(x_NK: torch.Tensor, out: Scaled | None = None) -> Scaled:
    """See `cast_rows`."""
    x_NK = x_NK.contiguous()
    rows, columns = x_NK.shape
    out = out or empty_scaled(rows, columns, x_NK.device)
    if rows:
        block = min(4096, power_of_2(columns))
        _rows_kernel[(rows,)](
            x_NK, out.data_NK, out.scale_N, columns,
            BLOCK=block, LARGEST=LARGEST, SMALLEST=SMALLEST, num_warps=max(1, min(8, block // 512)),
        )  # fmt: skip
    return out


def _cast(x_NK: torch.Tensor, turned: Scaled | None, both: bool, by_row: Scaled | None) -> tuple[Scaled, Scaled]:
    """(by columns; by rows where `both`, else the first again)"""
    x_NK = x_NK.contiguous()
    rows, columns = x_NK.shape
    turned = turned or empty_scaled(columns, rows, x_NK.device)
    by_row = by_row or (empty_scaled(rows, columns, x_NK.device) if both else turned)
    if rows and columns:
        most = torch.zeros(columns + rows * both, dtype=torch.int32, device=x_NK.device)
        most_K, most_N = most[:columns], most[columns:]
        _largest_kernel[(cdiv(columns, 128), cdiv(rows, STRIPE))](
            x_NK, most_K, most_N, rows, columns, BOTH=both, ROWS=32, COLS=128, STRIPE=STRIPE, num_warps=4
        )
        _columns_kernel[(cdiv(columns, 64), cdiv(rows, 128))](
            x_NK, turned.data_NK, turned.scale_N, most_K, by_row.data_NK, by_row.scale_N, most_N, rows, columns,
            BOTH=both, ROWS=128, COLS=64, LARGEST=LARGEST, SMALLEST=SMALLEST, num_warps=8,
        )  # fmt: skip
    return turned, by_row


def triton_cast_columns(x_NK: torch.Tensor, out: Scaled | None = None) -> Scaled:
    """See `cast_columns`."""
    return _cast(x_NK, out, False, None)[0]


def triton_cast_both(x_NK: torch.Tensor, rows: Scaled | None, columns: Scaled | None) -> tuple[Scaled, Scaled]:
    """See `cast_both`."""
    turned, by_row = _cast(x_NK, columns, True, rows)
    return by_row, turned


def triton_swiglu_scaled(x_N2F: torch.Tensor) -> Scaled:
    """See `swiglu_scaled`."""
    x = x_N2F.contiguous()
    rows, width = x.shape[0], x.shape[1] // 2
    out = empty_scaled(rows, width, x.device)
    if rows:
        _swiglu_rows_kernel[(rows,)](
            x, x, out.data_NK, out.scale_N, x, x, width,
            BLOCK=min(2048, power_of_2(width)), BACKWARD=False, LARGEST=LARGEST, SMALLEST=SMALLEST, num_warps=8,
        )  # fmt: skip
    return out


def triton_swiglu_backward_rows(x_N2F: torch.Tensor, dy_NF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Scaled]:
    """See `swiglu_backward_rows`."""
    x, dy = x_N2F.contiguous(), dy_NF.contiguous()
    rows, width = dy.shape
    dx, y, out = torch.empty_like(x), torch.empty_like(dy), empty_scaled(rows, 2 * width, x.device)
    if rows:
        _swiglu_rows_kernel[(rows,)](
            x, dy, out.data_NK, out.scale_N, dx, y, width,
            BLOCK=min(2048, power_of_2(width)), BACKWARD=True, LARGEST=LARGEST, SMALLEST=SMALLEST, num_warps=8,
        )  # fmt: skip
    return dx, y, out


def triton_swiglu_backward_columns(x_N2F: torch.Tensor, dy_NF: torch.Tensor) -> tuple[Scaled, Scaled, Scaled]:
    """See `swiglu_backward_columns`."""
    x, dy = x_N2F.contiguous(), dy_NF.contiguous()
    rows, width = dy.shape
    by_row = empty_scaled(rows, 2 * width, x.device)
    by_column, y = empty_scaled(2 * width, rows, x.device), empty_scaled(width, rows, x.device)
    if rows:
        most = torch.zeros(rows + 3 * width, dtype=torch.int32, device=x.device)
        row, dx_most, y_most = most.split([rows, 2 * width, width])
        _swiglu_largest_kernel[(cdiv(width, 128), cdiv(rows, STRIPE))](
            x, dy, row, dx_most, y_most, rows, width,
            ROWS=16, COLS=128, STRIPE=STRIPE, num_warps=8,
        )  # fmt: skip
        _swiglu_columns_kernel[(cdiv(width, 64), cdiv(rows, 64))](
            x, dy, row, dx_most, y_most, by_row.data_NK, by_column.data_NK, y.data_NK,
            by_row.scale_N, by_column.scale_N, y.scale_N, rows, width,
            ROWS=64, COLS=64, LARGEST=LARGEST, SMALLEST=SMALLEST, num_warps=8,
        )  # fmt: skip
    return by_row, by_column, y
