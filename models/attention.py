"""Causal attention within the documents of a packed batch.

Shape suffixes: T local queries, S keys of all context ranks, H query heads, G key heads, D head dimension, N segments,
Q and K lengths.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..core.errors import ConfigError
from ..core.layout import DocumentLayout
from ..kernels.batch_invariant import is_batch_invariant
from ..kernels.decode_attention import cached_attention
from ..kernels.decode_cache import PAGE, CacheLayer, Rows
from .varlen_attention import ragged_attention


class _GatherKeys(torch.autograd.Function):
    """Concatenate over context ranks; the gradient of each part is summed over the ranks that used it."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        whole = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx, grad):
        own = grad.new_empty(grad.shape[0] // dist.get_world_size(ctx.group), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None


def packed_attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    layout: DocumentLayout,
    scale: float | None = None,
    context_group: dist.ProcessGroup | None = None,
    window: int = 0,
) -> torch.Tensor:
    """Attention output (T, H, D). Keys and values of other context ranks are gathered first. With a `window`, a token
    sees the last `window` tokens, itself included.
    """
    k_SGD, v_SGD = k_TGD, v_TGD
    if layout.k_order_S is not None:
        k_SGD = _GatherKeys.apply(k_TGD, context_group)[layout.k_order_S]
        v_SGD = _GatherKeys.apply(v_TGD, context_group)[layout.k_order_S]
    if window and layout.max_k > window:
        if is_batch_invariant():
            raise ConfigError("batch_invariant: cannot be combined with sliding windows (model.sliding_window)")
        return _by_length(q_THD, k_SGD, v_SGD, layout, scale, window)
    if is_batch_invariant():
        return _row_by_row(q_THD, k_SGD, v_SGD, layout, scale)
    if q_THD.is_cuda and q_THD.dtype != torch.float32 and layout.restore_T is not None:
        return ragged_attention(q_THD, k_SGD, v_SGD, layout, scale, _by_length)
    return _by_length(q_THD, k_SGD, v_SGD, layout, scale)


def _by_length(
    q_THD: torch.Tensor,
    k_SGD: torch.Tensor,
    v_SGD: torch.Tensor,
    layout: DocumentLayout,
    scale: float | None,
    window: int = 0,
) -> torch.Tensor:
    """One call per group of segments of equal lengths."""
    outputs = []
    for group in layout.groups:
        q = _batched(q_THD, group.q_rows, group.count, group.q_len)
        k, v = (_batched(x, group.k_rows, group.count, group.k_len) for x in (k_SGD, v_SGD))
        if not q.is_cuda and k.shape[1] != q.shape[1]:  # the CPU's fused kernel wants equal head counts
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        cut = 0 < window < group.k_len
        square = group.q_len == group.k_len and not cut
        mask = None
        if not square:
            last = group.k_len - group.q_len  # queries are the last positions of their keys
            mask = torch.ones(group.q_len, group.k_len, dtype=torch.bool, device=q.device).tril(last)
            mask = mask.triu(last - window + 1) if cut else mask
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=square, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
        )
        outputs.append(out.transpose(1, 2).reshape(-1, *q_THD.shape[1:]))
    return outputs[0] if layout.restore_T is None else torch.cat(outputs)[layout.restore_T]


def _batched(x: torch.Tensor, rows: torch.Tensor | None, count: int, length: int) -> torch.Tensor:
    """Rows as (segments, heads, length, D)."""
    return (x if rows is None else x[rows]).view(count, length, *x.shape[1:]).transpose(1, 2)


def _row_by_row(q_THD, k_SGD, v_SGD, layout: DocumentLayout, scale: float | None) -> torch.Tensor:
    """The sampler's own kernel with each token as its own row: bit-equal to when the token was sampled."""
    if layout.k_order_S is not None:
        raise ConfigError("batch_invariant: cannot be combined with parallel.context > 1")
    first_N, document_T = layout.cu_q.long(), layout.document_T.long()
    pages_N = (first_N.diff() + PAGE - 1) // PAGE
    begin_N = pages_N.cumsum(0) - pages_N
    place_T = torch.arange(len(q_THD), device=q_THD.device) - first_N[document_T]
    total, most = len(q_THD) // PAGE + len(pages_N), -(-layout.max_q // PAGE)
    at_T = begin_N[document_T] * PAGE + place_T

    def paged(x_SGD: torch.Tensor) -> torch.Tensor:
        flat = x_SGD.new_zeros((total * PAGE, *x_SGD.shape[1:]))
        flat[at_T] = x_SGD
        return flat.view(total, PAGE, *x_SGD.shape[1:]).transpose(1, 2).contiguous().view(-1)

    table_NP = begin_N[:, None] + torch.arange(most, device=q_THD.device)  # past a document's end: not read
    rows = Rows(table_NP.int()[document_T], place_T, PAGE)
    cache = CacheLayer(paged(k_SGD), paged(v_SGD), torch.zeros(2, dtype=torch.int64, device=q_THD.device))
    return cached_attention(
        q_THD.contiguous(), cache, rows, k_SGD.shape[1], scale=scale or 1.0 / math.sqrt(q_THD.shape[2])
    )
