"""Triton side of kernels/qkv.py; the backward turns the other way and packs again.

Shape suffixes: T tokens, C columns of the projection, H query heads, G key heads, D head dimension, R rotated
dimensions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import cdiv, power_of_2


@triton.jit
def _place(token, h, H, G, EACH):
    """(is query, is key, is value, index of the head's first element in its own tensor, in heads)."""
    g = h // (EACH + 2)
    j = h - g * (EACH + 2)
    row = tl.where(j < EACH, token * H + g * EACH + j, token * G + g)
    return j < EACH, j == EACH, j == EACH + 1, row


@triton.jit
def _pick(q_ptr, k_ptr, v_ptr, at, is_q, is_k, is_v):
    """Elements of three tensors, each masked to its own heads."""
    q = tl.load(q_ptr + at, mask=is_q, other=0.0).to(tl.float32)
    return (
        q
        + tl.load(k_ptr + at, mask=is_k, other=0.0).to(tl.float32)
        + tl.load(v_ptr + at, mask=is_v, other=0.0).to(tl.float32)
    )


@triton.jit
def _put(q_ptr, k_ptr, v_ptr, at, value, is_q, is_k, is_v):
    tl.store(q_ptr + at, value, mask=is_q)
    tl.store(k_ptr + at, value, mask=is_k)
    tl.store(v_ptr + at, value, mask=is_v)


@triton.jit
def _qkv_kernel(
    x_ptr, bias_ptr, q_ptr, k_ptr, v_ptr, table_ptr, H, G, EACH, R: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, HEADS: tl.constexpr, BIAS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    total = G * (EACH + 2)
    is_q, is_k, is_v, row = _place(token, h, H, G, EACH)
    half: tl.constexpr = R // 2
    o = tl.arange(0, HALF)[None, :]
    live = (h < total) & (o < half)
    cos = tl.load(table_ptr + token * R + o, mask=o < half, other=1.0)
    sin = tl.load(table_ptr + token * R + half + o, mask=o < half, other=0.0)
    cos, sin = tl.where(is_v, 1.0, cos), tl.where(is_v, 0.0, sin)
    packed = (token * total + h) * D + o
    at = row * D + o
    if BACKWARD:
        first = _pick(q_ptr, k_ptr, v_ptr, at, is_q & live, is_k & live, is_v & live)
        second = _pick(q_ptr, k_ptr, v_ptr, at + half, is_q & live, is_k & live, is_v & live)
        tl.store(x_ptr + packed, (first * cos + second * sin).to(x_ptr.dtype.element_ty), mask=live)
        tl.store(x_ptr + packed + half, (second * cos - first * sin).to(x_ptr.dtype.element_ty), mask=live)
    else:
        first, second = (
            tl.load(x_ptr + packed, mask=live, other=0.0),
            tl.load(x_ptr + packed + half, mask=live, other=0.0),
        )
        if BIAS:
            first = (first.to(tl.float32) + tl.load(bias_ptr + h * D + o, mask=live, other=0.0).to(tl.float32)).to(
                x_ptr.dtype.element_ty
            )
            second = second.to(tl.float32) + tl.load(bias_ptr + h * D + half + o, mask=live, other=0.0).to(tl.float32)
            second = second.to(x_ptr.dtype.element_ty)
        first, second = first.to(tl.float32), second.to(tl.float32)
        turned = (first * cos - second * sin).to(x_ptr.dtype.element_ty)
        _put(q_ptr, k_ptr, v_ptr, at, turned, is_q & live, is_k & live, is_v & live)
        turned = (second * cos + first * sin).to(x_ptr.dtype.element_ty)
        _put(q_ptr, k_ptr, v_ptr, at + half, turned, is_q & live, is_k & live, is_v & live)
    if D > R:
        o = R + tl.arange(0, REST)[None, :]
        live = (h < total) & (o < D)
        packed, at = (token * total + h) * D + o, row * D + o
        if BACKWARD:
            value = _pick(q_ptr, k_ptr, v_ptr, at, is_q & live, is_k & live, is_v & live)
            tl.store(x_ptr + packed, value.to(x_ptr.dtype.element_ty), mask=live)
        else:
            value = tl.load(x_ptr + packed, mask=live, other=0.0).to(tl.float32)
            if BIAS:
                value += tl.load(bias_ptr + h * D + o, mask=live, other=0.0).to(tl.float32)
            _put(q_ptr, k_ptr, v_ptr, at, value.to(x_ptr.dtype.element_ty), is_q & live, is_k & live, is_v & live)


def _launch(x_TC, bias_C, q_THD, k_TGD, v_TGD, table_TR, backward: bool) -> None:
    tokens, heads, dim = q_THD.shape
    groups, rotated = k_TGD.shape[1], table_TR.shape[1]
    total = heads + 2 * groups
    block = min(16, power_of_2(total))
    if tokens:
        _qkv_kernel[(tokens, cdiv(total, block))](
            x_TC, x_TC if bias_C is None else bias_C, q_THD, k_TGD, v_TGD, table_TR, heads, groups, heads // groups,
            R=rotated, D=dim,
            HALF=power_of_2(rotated // 2), REST=power_of_2(max(1, dim - rotated)), HEADS=block,
            BIAS=bias_C is not None, BACKWARD=backward, num_warps=4,
        )  # fmt: skip


class _QKVRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TC, bias_C, table_TR, heads, groups):
        dim = x_TC.shape[1] // (heads + 2 * groups)
        q_THD = x_TC.new_empty((len(x_TC), heads, dim))
        k_TGD, v_TGD = (x_TC.new_empty((len(x_TC), groups, dim)) for _ in range(2))
        _launch(x_TC, bias_C, q_THD, k_TGD, v_TGD, table_TR, False)
        ctx.save_for_backward(table_TR)
        ctx.bias = bias_C is not None
        return q_THD, k_TGD, v_TGD

    @staticmethod
    def backward(ctx, dq_THD, dk_TGD, dv_TGD):
        (table_TR,) = ctx.saved_tensors
        dx_TC = dq_THD.new_empty((len(dq_THD), dq_THD[0].numel() + dk_TGD[0].numel() * 2 if len(dq_THD) else 0))
        _launch(dx_TC, None, dq_THD.contiguous(), dk_TGD.contiguous(), dv_TGD.contiguous(), table_TR, True)
        return dx_TC, dx_TC.sum(0) if ctx.bias else None, None, None, None


def triton_qkv_rope(x_TC, bias_C, table_TR, heads: int, groups: int):
    """See `qkv_rope`."""
    return _QKVRope.apply(x_TC.contiguous(), bias_C, table_TR.contiguous(), heads, groups)
