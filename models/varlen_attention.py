"""Attention over documents of different lengths on a GPU, and which kernel computes it.

FlashAttention-4 (the extra `fa4`) runs where it is installed and the GPU is a Hopper or newer: it takes grouped heads
as they are and is twice as fast as torch's. Elsewhere torch's variable-length kernel and one call a length are timed on
the first batch of a kind. Shape suffixes as in attention.py.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ..core.layout import DocumentLayout

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, DocumentLayout, float | None], torch.Tensor]
# another kernel must be this much faster than torch's own: a near tie should not fall differently in every run
MARGIN = 0.9
log = logging.getLogger(__name__)
_chosen: dict[tuple[Any, ...], Attend] = {}


@cache
def flash_function() -> Callable | None:
    """FlashAttention-4's variable-length function, or None where it is not installed."""
    try:
        from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found]
    except ModuleNotFoundError as error:
        if error.name in ("flash_attn", "flash_attn.cute"):
            return None
        log.warning("FlashAttention-4 is installed but does not import (%s): pip install 'terrella[fa4]'", error)
        return None
    except Exception as error:  # a compiler package that does not match this CUDA says so in many ways
        log.warning("FlashAttention-4 is installed but does not import: %s: %s", type(error).__name__, error)
        return None
    return flash_attn_varlen_func


def flash(
    q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, layout: DocumentLayout, scale: float | None
) -> torch.Tensor:
    """FlashAttention-4; queries and keys of a segment end together, as its causal mask has it."""
    call = flash_function()
    assert call is not None
    k_SGD, v_SGD = _keys(k_SGD, v_SGD, layout)
    out = call(
        q_THD,
        k_SGD,
        v_SGD,
        cu_seqlens_q=layout.cu_q,
        cu_seqlens_k=layout.cu_k,
        max_seqlen_q=layout.max_q,
        max_seqlen_k=layout.max_k,
        softmax_scale=scale,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out[0] if isinstance(out, tuple) else out  # some releases return the normalisers too


def varlen(
    q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, layout: DocumentLayout, scale: float | None
) -> torch.Tensor:
    """Torch's variable-length kernel."""
    from torch.nn.attention.varlen import varlen_attn

    k_SGD, v_SGD = _keys(k_SGD, v_SGD, layout)
    takes = _varlen_options()
    options: dict = {"window_size": (-1, 0)} if "window_size" in takes else {"is_causal": True}
    if "scale" in takes:
        options["scale"] = scale
    elif scale is not None:
        q_THD = q_THD * (scale * q_THD.shape[-1] ** 0.5)
    if q_THD.shape[1] != k_SGD.shape[1]:
        if "enable_gqa" in takes:
            options["enable_gqa"] = True
        else:
            k_SGD, v_SGD = (x.repeat_interleave(q_THD.shape[1] // x.shape[1], 1) for x in (k_SGD, v_SGD))
    out = varlen_attn(q_THD, k_SGD, v_SGD.contiguous(), layout.cu_q, layout.cu_k, layout.max_q, layout.max_k, **options)
    assert isinstance(out, torch.Tensor)  # a pair only when asked for auxiliary results
    return out


def _keys(k_SGD: torch.Tensor, v_SGD: torch.Tensor, layout: DocumentLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of the segments end to end: with context parallelism a document's keys serve several segments."""
    return (k_SGD, v_SGD) if layout.k_rows is None else (k_SGD[layout.k_rows], v_SGD[layout.k_rows])


@cache
def _varlen_options() -> frozenset[str]:
    """Parameters of torch's function, which grew from release to release (2.10: is_causal; later: window_size,
    scale, enable_gqa).
    """
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def ragged_attention(
    q_THD: torch.Tensor,
    k_SGD: torch.Tensor,
    v_SGD: torch.Tensor,
    layout: DocumentLayout,
    scale: float | None,
    by_length: Attend,
) -> torch.Tensor:
    """Attention output (T, H, D) by the best kernel there is; `by_length` makes one call for each pair of lengths."""
    kind = (q_THD.device, q_THD.dtype, q_THD.shape[1:], k_SGD.shape[1], len(layout.groups).bit_length())
    attend = _chosen.get(kind)
    if attend is None and torch.cuda.is_current_stream_capturing():
        attend = varlen  # nothing can be timed now
    if attend is None:
        attend = _chosen[kind] = choose(q_THD, k_SGD, v_SGD, layout, scale, by_length)
    if attend is by_length and torch.cuda.is_current_stream_capturing():
        # a graph is replayed with other lengths, which only a kernel that reads them from the device follows
        attend = varlen
    return attend(q_THD, k_SGD, v_SGD, layout, scale)


def choose(
    q_THD: torch.Tensor,
    k_SGD: torch.Tensor,
    v_SGD: torch.Tensor,
    layout: DocumentLayout,
    scale: float | None,
    by_length: Attend,
) -> Attend:
    """FlashAttention-4 where it runs on this GPU and these shapes, else the faster of torch's two ways."""
    inputs = (q_THD, k_SGD, v_SGD, layout, scale)
    if flash_function() is not None and torch.cuda.get_device_capability(q_THD.device) >= (9, 0):
        try:
            seconds(flash, *inputs, repeats=1)
            return flash
        except Exception as error:  # it compiles for the shape: what it cannot do it says in many ways
            log.warning(
                "FlashAttention-4 cannot take %d/%d heads of %d: %s",
                q_THD.shape[1],
                k_SGD.shape[1],
                q_THD.shape[2],
                error,
            )
    if any(group.q_len != group.k_len for group in layout.groups):
        return varlen  # context parallel: a call a length would need a mask as large as its scores
    plain, grouped = seconds(varlen, *inputs), seconds(by_length, *inputs)
    log.info(
        "ragged attention: torch's variable-length kernel %.2f ms, one call a length %.2f ms",
        plain * 1e3,
        grouped * 1e3,
    )
    return by_length if grouped < MARGIN * plain else varlen


def seconds(
    attend: Attend,
    q_THD: torch.Tensor,
    k_SGD: torch.Tensor,
    v_SGD: torch.Tensor,
    layout: DocumentLayout,
    scale: float | None,
    repeats: int = 3,
) -> float:
    """The shortest time of a forward and a backward pass, after one that compiles."""
    with torch.enable_grad():
        q, k, v = leaves = tuple(x.detach().clone().requires_grad_() for x in (q_THD, k_SGD, v_SGD))
        times = []
        for _ in range(repeats + 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            out = attend(q, k, v, layout, scale)
            torch.autograd.grad(out, leaves, torch.ones_like(out))
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return min(times[1:])
