"""Triton side of kernels/adam.py: every number is read once and written once, all tensors in one launch. N elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..dispatch import cdiv

BLOCK, CHUNK = 2048, 65536  # elements at once, and of one program


@triton.jit
def _adam_kernel(
    table_ptr, place_ptr, divisor_ptr, lr, beta1, beta2, log_beta1, log_beta2, eps, decay,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, COPY: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    divisor = tl.load(divisor_ptr)
    if tl.abs(divisor) < float("inf"):  # false for NaN too
        tensor = tl.load(place_ptr + 2 * tl.program_id(0)).to(tl.int64)
        start = tl.load(place_ptr + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
        row = table_ptr + 7 * tensor
        p_ptr = tl.load(row).to(tl.pointer_type(tl.float32))
        g_ptr = tl.load(row + 1).to(tl.pointer_type(tl.float32))
        m_ptr = tl.load(row + 2).to(tl.pointer_type(tl.float32))
        v_ptr = tl.load(row + 3).to(tl.pointer_type(tl.float32))
        copy_ptr = tl.load(row + 4).to(tl.pointer_type(tl.bfloat16))
        step = tl.load(tl.load(row + 5).to(tl.pointer_type(tl.float32)))
        end = tl.minimum(start + CHUNK, tl.load(row + 6))
        if ALIGNED:  # else the compiler must take every element for itself
            p_ptr, g_ptr, m_ptr = tl.multiple_of(p_ptr, 16), tl.multiple_of(g_ptr, 16), tl.multiple_of(m_ptr, 16)
            v_ptr, copy_ptr, end = tl.multiple_of(v_ptr, 16), tl.multiple_of(copy_ptr, 16), tl.multiple_of(end, 16)
        correction1, correction2 = 1.0 - tl.exp2(step * log_beta1), 1.0 - tl.exp2(step * log_beta2)
        for first in range(start, end, BLOCK):
            o = first + tl.arange(0, BLOCK)
            ok = o < end
            g = tl.load(g_ptr + o, mask=ok, other=0.0) / divisor
            m = beta1 * tl.load(m_ptr + o, mask=ok, other=0.0) + (1.0 - beta1) * g
            v = beta2 * tl.load(v_ptr + o, mask=ok, other=0.0) + (1.0 - beta2) * g * g
            p = tl.load(p_ptr + o, mask=ok, other=0.0) * (1.0 - lr * decay)
            p -= lr / correction1 * m / (tl.sqrt(v / correction2) + eps)
            tl.store(m_ptr + o, m, mask=ok)
            tl.store(v_ptr + o, v, mask=ok)
            tl.store(p_ptr + o, p, mask=ok)
            if COPY:
                tl.store(copy_ptr + o, p.to(tl.bfloat16), mask=ok)


@dataclass(frozen=True)
class _Launch:
    """Tensors that one launch takes: seven numbers of each, and the tensor and chunk of each program."""

    table: torch.Tensor
    place: torch.Tensor
    copy: bool
    aligned: bool


_launches: dict[tuple[int, ...], list[_Launch]] = {}


def _prepare(parts: Sequence[Any], rows: tuple[int, ...], device: torch.device) -> list[_Launch]:
    """Sort tensors by what a launch must know when it is compiled: whether there is a copy, and whether all is
    aligned.
    """
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for i, (*wide, copy, step) in enumerate(parts):
        fine = all(x.dtype == torch.float32 and x.is_contiguous() for x in (*wide, step))
        if not fine or not (copy is None or (copy.dtype == torch.bfloat16 and copy.is_contiguous())):
            raise ValueError("adam_update: takes contiguous fp32 tensors, and bf16 copies")
        row = rows[7 * i : 7 * i + 7]
        aligned = not (row[6] % 16 or any(address % 16 for address in row[:5]))
        if row[6]:
            kinds.setdefault((copy is not None, aligned), []).extend(row)
    made = []
    for (copies, aligned), some in kinds.items():
        chunks = [(i, chunk) for i, count in enumerate(some[6::7]) for chunk in range(cdiv(count, CHUNK))]
        table, place = torch.tensor(some, device=device), torch.tensor(chunks, dtype=torch.int32, device=device)
        made.append(_Launch(table, place, copies, aligned))
    return made


def triton_adam_update(
    parts: Sequence[Any],
    divisor: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """See `adam_update`."""
    # Thousands of tensors every step: one loop that only reads addresses, and everything else again only when one of
    # them has changed.
    rows = tuple([x for p, g, m, v, copy, step in parts for x in (
        p.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr(), 0 if copy is None else copy.data_ptr(),
        step.data_ptr(), p.numel(),
    )])  # fmt: skip
    launches = _launches.get(rows)
    if launches is None:
        if len(_launches) == 16:
            _launches.clear()
        launches = _launches[rows] = _prepare(parts, rows, divisor.device)
    for launch in launches:
        _adam_kernel[(len(launch.place),)](
            launch.table, launch.place, divisor, float(lr), betas[0], betas[1], math.log2(betas[0]),
            math.log2(betas[1]), eps,
            float(weight_decay), BLOCK=BLOCK, CHUNK=CHUNK, COPY=launch.copy, ALIGNED=launch.aligned, num_warps=8,
        )  # fmt: skip
