"""What lies between the projection to queries, keys and values and attention: bias, cut into heads, rotary embedding,
in one pass.

Shape suffixes: T tokens, C columns of the projection, H query heads, G key heads, D head dimension, R rotated
dimensions. The projection is packed per key head: its queries, its key, its value.
"""

from __future__ import annotations

import torch

from .dispatch import use_triton
from .rope import reference_rope

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def cut_heads(x_TC: torch.Tensor, bias_C: torch.Tensor | None, heads: int, groups: int) -> Heads:
    """(queries (T, H, D), keys and values (T, G, D)) of a packed projection, with its bias added."""
    if bias_C is not None:
        x_TC = x_TC + bias_C
    each = heads // groups
    x_TGED = x_TC.view(len(x_TC), groups, each + 2, -1)
    return x_TGED[:, :, :each].flatten(1, 2), x_TGED[:, :, each], x_TGED[:, :, each + 1]


def reference_qkv_rope(
    x_TC: torch.Tensor, bias_C: torch.Tensor | None, table_TR: torch.Tensor, heads: int, groups: int
) -> Heads:
    """Plain torch; the sum with the bias is rounded to the input's type before it is turned."""
    q_THD, k_TGD, v_TGD = cut_heads(x_TC, bias_C, heads, groups)
    rows_T = torch.arange(len(x_TC), device=x_TC.device)
    return reference_rope(q_THD, table_TR, rows_T), reference_rope(k_TGD, table_TR, rows_T), v_TGD


def qkv_rope(x_TC: torch.Tensor, bias_C: torch.Tensor | None, table_TR: torch.Tensor, heads: int, groups: int) -> Heads:
    """Queries, keys and values ready for attention. Row t of the table holds R/2 cosines, then R/2 sines, of token
    t.
    """
    if use_triton(x_TC):
        from .triton.qkv import triton_qkv_rope

        return triton_qkv_rope(x_TC, bias_C, table_TR, heads, groups)
    return reference_qkv_rope(x_TC, bias_C, table_TR, heads, groups)
