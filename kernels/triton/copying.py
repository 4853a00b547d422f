"""Triton side of kernels/copying.py: one program a row walks over its tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import power_of_2


@triton.jit
def _propose_kernel(
    text_ptr, length_ptr, source_ptr, token_ptr, at_ptr, room, WIDTH: tl.constexpr, WP: tl.constexpr,
    LONGEST: tl.constexpr, SURE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    text_ptr += row * room
    length = tl.load(length_ptr + row).to(tl.int32)
    best = tl.full([BLOCK], -1, tl.int64)
    for low in range(0, length, BLOCK):
        j = low + tl.arange(0, BLOCK)
        same = j < length
        score = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(LONGEST):
            end = tl.load(text_ptr + length - back, mask=length >= back, other=-1)
            same = same & (j >= back)
            same = same & (tl.load(text_ptr + j - back, mask=same, other=-2) == end)
            score += same.to(tl.int64)
        best = tl.maximum(best, tl.where(j < length, score * room + j, -1))
    top = tl.max(best, axis=0)
    at = tl.where(top < 0, -1, top % room)
    source = tl.load(source_ptr + row)
    at = tl.where((top < SURE * room) & (source < length), source, at)
    step = tl.arange(0, WP)
    index = tl.where(step == 0, length, at + 1 + (step + (length - at) - 1) % (length - at))
    token = tl.load(text_ptr + index, mask=step < WIDTH, other=0)
    tl.store(token_ptr + row * WIDTH + step, token.to(tl.int64), mask=step < WIDTH)
    tl.store(at_ptr + row, at)


def triton_propose(
    text_BL: torch.Tensor, length_B: torch.Tensor, source_B: torch.Tensor, ahead: int, *, longest: int, sure: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `propose`."""
    rows, room = text_BL.shape
    token_BK = torch.empty((rows, ahead + 1), dtype=torch.int64, device=text_BL.device)
    at_B = torch.empty(rows, dtype=torch.int64, device=text_BL.device)
    if rows:
        _propose_kernel[(rows,)](
            text_BL, length_B, source_B, token_BK, at_B, room, WIDTH=ahead + 1, WP=power_of_2(ahead + 1),
            LONGEST=longest, SURE=sure, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return token_BK, at_B
