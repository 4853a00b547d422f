"""Triton side of kernels/sample.py: one read of the row, and a second one of the eighth of it that holds the chosen token.

Each thread keeps its own running maximum and sums over 16-byte vectors, so the long loop has no reduction across threads. A row is
parts, a part is tiles, a tile is vectors; the choice goes down these levels, each time with what is left of the random number.
Shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _descend(mass, i, rest):
    """(the entry at which the running sum passes `rest`, what is left of it); rounding never picks an empty entry."""
    mass = mass.to(tl.float64)
    upto = tl.cumsum(mass, axis=0)
    last = tl.max(tl.where(mass > 0.0, i, 0), axis=0)
    at = tl.minimum(tl.sum((upto <= rest).to(tl.int32), axis=0), last)
    return at, rest - tl.sum(tl.where(i == at, upto - mass, 0.0), axis=0)


@triton.jit
def _sample_kernel(
    x_ptr, u_ptr, t_ptr, low_ptr, high_ptr, token_ptr, logprob_ptr, stride, V, RB: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr,
    TP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = RB * K
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride
    temperature = tl.load(t_ptr + row)
    low, high = tl.load(low_ptr + row).to(tl.int32), tl.load(high_ptr + row).to(tl.int32)
    greedy = temperature == 0.0
    scale = LOG2E / tl.where(greedy, 1.0, temperature)
    i, k = tl.arange(0, RB), tl.arange(0, K)
    inner = i[:, None] * K + k[None, :]
    part, tile = tl.arange(0, PARTS), tl.arange(0, TP)
    tops = tl.full([PARTS], LOWEST, tl.float32)  # of every part: largest logit,
    sums = tl.zeros([PARTS], tl.float32)  # sum of 2^((x - top) scale),
    picks = tl.zeros([PARTS], tl.float32)  # the same over the allowed ids,
    bests = tl.full([PARTS], LOWEST, tl.float32)  # and their largest logit
    for n in range(tl.cdiv(V, BLOCK * TILES)):
        m = tl.full([RB], LOWEST, tl.float32)
        b = tl.full([RB], LOWEST, tl.float32)
        l = tl.zeros([RB], tl.float32)
        p = tl.zeros([RB], tl.float32)
        for j in range(TILES):
            o = (n * TILES + j) * BLOCK + inner
            x = tl.load(x_ptr + o, mask=o < V, other=-float("inf")).to(tl.float32)
            allowed = (o >= low) & (o < high)
            top = tl.maximum(m, tl.max(x, axis=1))
            a = tl.exp2((m - top) * scale)
            e = tl.exp2((x - top[:, None]) * scale)
            l = l * a + tl.sum(e, axis=1)
            p = p * a + tl.sum(tl.where(allowed, e, 0.0), axis=1)
            b = tl.maximum(b, tl.max(tl.where(allowed, x, LOWEST), axis=1))
            m = top
        top = tl.max(m, axis=0)
        w = tl.exp2((m - top) * scale)
        tops = tl.where(part == n, top, tops)
        sums = tl.where(part == n, tl.sum(l * w, axis=0), sums)
        picks = tl.where(part == n, tl.sum(p * w, axis=0), picks)
        bests = tl.where(part == n, tl.max(b, axis=0), bests)
    M = tl.max(tops, axis=0)
    w = tl.exp2((tops - M) * scale)
    total = tl.sum(sums * w, axis=0)
    if greedy:
        own = tl.max(bests, axis=0)
        n = tl.argmax(bests, axis=0, tie_break_left=True)
        token = V
        for j in range(TILES):
            o = (n * TILES + j) * BLOCK + inner
            x = tl.load(x_ptr + o, mask=(o < V) & (o >= low) & (o < high), other=-float("inf")).to(tl.float32)
            token = tl.minimum(token, tl.min(tl.min(tl.where(x == own, o, V), axis=1), axis=0))
        token = tl.minimum(token, V - 1)
    else:
        rest = tl.load(u_ptr + row) * tl.sum((picks * w).to(tl.float64), axis=0)
        n, rest = _descend(picks * w, part, rest)
        masses = tl.zeros([TP], tl.float32)
        for j in range(TILES):
            o = (n * TILES + j) * BLOCK + inner
            x = tl.load(x_ptr + o, mask=(o < V) & (o >= low) & (o < high), other=-float("inf")).to(tl.float32)
            masses = tl.where(tile == j, tl.sum(tl.sum(tl.exp2((x - M) * scale), axis=1), axis=0), masses)
        j, rest = _descend(masses, tile, rest)
        o = (n * TILES + j) * BLOCK + inner
        x = tl.load(x_ptr + o, mask=(o < V) & (o >= low) & (o < high), other=-float("inf")).to(tl.float32)
        e = tl.exp2((x - M) * scale)
        at, rest = _descend(tl.sum(e, axis=1), i, rest)
        here = i[:, None] == at
        in_vector, _ = _descend(tl.sum(tl.where(here, e, 0.0), axis=0), k, rest)
        token = (n * TILES + j) * BLOCK + at * K + in_vector
        own = tl.sum(tl.sum(tl.where(o == token, x, 0.0), axis=1), axis=0)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logprob_ptr + row, ((own - M) * scale - tl.log2(total)) * LN2)


def triton_sample(
    logits_BV: torch.Tensor, u_B: torch.Tensor, temperature_B: torch.Tensor, low_B: torch.Tensor, high_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `sample_tokens`."""
    rows, vocab = logits_BV.shape
    token_B = torch.empty(rows, dtype=torch.int64, device=logits_BV.device)
    logprob_B = torch.empty(rows, dtype=torch.float32, device=logits_BV.device)
    lines, warps = (512, 8) if vocab > 32768 else (128, 4)
    tiles = triton.cdiv(triton.cdiv(vocab, lines * 8), 8)
    if rows:
        _sample_kernel[(rows,)](
            logits_BV, u_B, temperature_B, low_B, high_B, token_B, logprob_B, logits_BV.stride(0), vocab, RB=lines, K=8, TILES=tiles,
            TP=triton.next_power_of_2(tiles), PARTS=triton.next_power_of_2(triton.cdiv(vocab, lines * 8 * tiles)), num_warps=warps,
        )  # fmt: skip
    return token_B, logprob_B
