"""Triton side of kernels/swiglu.py: each of forward and backward reads its inputs once.

Shape suffixes: N rows (tokens), F feed-forward width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import cdiv, power_of_2


@triton.jit
def _swiglu_kernel(x_ptr, dy_ptr, out_ptr, y_ptr, F, BLOCK: tl.constexpr, BACKWARD: tl.constexpr, AGAIN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # a grid's other axes end at 65,535
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = o < F
    gate = tl.load(x_ptr + row * 2 * F + o, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + o, mask=ok, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    if BACKWARD:
        dy = tl.load(dy_ptr + row * F + o, mask=ok, other=0.0).to(tl.float32)
        tl.store(
            out_ptr + row * 2 * F + o, (dy * up * s * (1.0 + gate * (1.0 - s))).to(out_ptr.dtype.element_ty), mask=ok
        )
        tl.store(out_ptr + row * 2 * F + F + o, (dy * gate * s).to(out_ptr.dtype.element_ty), mask=ok)
        if AGAIN:
            tl.store(y_ptr + row * F + o, (gate * s * up).to(y_ptr.dtype.element_ty), mask=ok)
    else:
        tl.store(out_ptr + row * F + o, (gate * s * up).to(out_ptr.dtype.element_ty), mask=ok)


def _launch(
    x_N2F: torch.Tensor, dy_NF: torch.Tensor, out: torch.Tensor, backward: bool, y_NF: torch.Tensor | None = None
) -> None:
    rows, width = x_N2F.shape[0], x_N2F.shape[1] // 2
    if rows:
        block = min(2048, power_of_2(width))
        _swiglu_kernel[(rows, cdiv(width, block))](
            x_N2F,
            dy_NF,
            out,
            out if y_NF is None else y_NF,
            width,
            BLOCK=block,
            BACKWARD=backward,
            AGAIN=y_NF is not None,
            num_warps=4,
        )


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_N2F):
        ctx.save_for_backward(x_N2F)
        out = x_N2F.new_empty((x_N2F.shape[0], x_N2F.shape[1] // 2))
        _launch(x_N2F, x_N2F, out, False)
        return out

    @staticmethod
    def backward(ctx, dy_NF):
        (x_N2F,) = ctx.saved_tensors
        out = torch.empty_like(x_N2F)
        _launch(x_N2F, dy_NF.contiguous(), out, True)
        return out


def triton_swiglu(x: torch.Tensor) -> torch.Tensor:
    """See `swiglu`; leading dimensions are flattened."""
    return _SwiGLU.apply(x.reshape(-1, x.shape[-1]).contiguous()).view(*x.shape[:-1], x.shape[-1] // 2)


def triton_swiglu_backward(x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `swiglu_backward`; leading dimensions are flattened."""
    flat, grad = x.reshape(-1, x.shape[-1]).contiguous(), dy.reshape(-1, dy.shape[-1]).contiguous()
    out, again = torch.empty_like(flat), torch.empty_like(grad)
    _launch(flat, grad, out, True, again)
    return out.view(x.shape), again.view(dy.shape)


@triton.jit
def _weighted_kernel(x_ptr, w_ptr, dy_ptr, y_ptr, dx_ptr, dw_ptr, F, BLOCK: tl.constexpr, BACKWARD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    w = tl.load(w_ptr + row).to(tl.float32)
    parts = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, F, BLOCK):
        o = start + tl.arange(0, BLOCK)
        ok = o < F
        gate = tl.load(x_ptr + row * 2 * F + o, mask=ok, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + row * 2 * F + F + o, mask=ok, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        y = gate * s * up
        tl.store(y_ptr + row * F + o, (y * w).to(y_ptr.dtype.element_ty), mask=ok)
        if BACKWARD:
            dy = tl.load(dy_ptr + row * F + o, mask=ok, other=0.0).to(tl.float32)
            parts += y * dy
            dy *= w
            tl.store(
                dx_ptr + row * 2 * F + o, (dy * up * s * (1.0 + gate * (1.0 - s))).to(dx_ptr.dtype.element_ty), mask=ok
            )
            tl.store(dx_ptr + row * 2 * F + F + o, (dy * gate * s).to(dx_ptr.dtype.element_ty), mask=ok)
    if BACKWARD:
        tl.store(dw_ptr + row, tl.sum(parts, 0).to(dw_ptr.dtype.element_ty))


def _launch_weighted(x, weight, dy, y, dx, dweight, backward: bool) -> None:
    rows, width = y.shape
    if rows:
        block = min(1024, power_of_2(width))
        _weighted_kernel[(rows,)](x, weight, dy, y, dx, dweight, width, BLOCK=block, BACKWARD=backward, num_warps=4)


def triton_weighted_swiglu(x_N2F: torch.Tensor, weight_N: torch.Tensor) -> torch.Tensor:
    """See `weighted_swiglu`."""
    x, weight = x_N2F.contiguous(), weight_N.contiguous()
    y = x.new_empty((x.shape[0], x.shape[1] // 2))
    _launch_weighted(x, weight, y, y, x, weight, False)
    return y


def triton_weighted_swiglu_backward(
    x_N2F: torch.Tensor, weight_N: torch.Tensor, dy_NF: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `weighted_swiglu_backward`."""
    x, weight, dy = x_N2F.contiguous(), weight_N.contiguous(), dy_NF.contiguous()
    y, dx, dweight = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(weight)
    _launch_weighted(x, weight, dy, y, dx, dweight, True)
    return dx, dweight, y
