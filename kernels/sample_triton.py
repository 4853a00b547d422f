"""Triton side of kernels/sample.py: one read of the row and a second one of the chunk that holds the chosen token.

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
def _sample_kernel(x_ptr, u_ptr, t_ptr, low_ptr, high_ptr, token_ptr, logprob_ptr, stride, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride
    temperature = tl.load(t_ptr + row)
    low, high = tl.load(low_ptr + row).to(tl.int32), tl.load(high_ptr + row).to(tl.int32)
    greedy = temperature == 0.0
    scale = LOG2E / tl.where(greedy, 1.0, temperature)
    c = tl.arange(0, CHUNKS)
    i = tl.arange(0, CHUNK)
    tops = tl.full([CHUNKS], LOWEST, tl.float32)  # of every chunk: largest logit,
    sums = tl.zeros([CHUNKS], tl.float32)  # sum of 2^((x - top) scale),
    picks = tl.zeros([CHUNKS], tl.float32)  # the same over the allowed ids,
    bests = tl.full([CHUNKS], LOWEST, tl.float32)  # and their largest logit
    for n in range(tl.cdiv(V, CHUNK)):
        o = n * CHUNK + i
        x = tl.load(x_ptr + o, mask=o < V, other=-float("inf")).to(tl.float32)
        allowed = (o >= low) & (o < high)
        top = tl.maximum(tl.max(x, axis=0), LOWEST)
        e = tl.exp2((x - top) * scale)
        here = c == n
        tops = tl.where(here, top, tops)
        sums = tl.where(here, tl.sum(e, axis=0), sums)
        if greedy:
            bests = tl.where(here, tl.max(tl.where(allowed, x, LOWEST), axis=0), bests)
        else:
            picks = tl.where(here, tl.sum(tl.where(allowed, e, 0.0), axis=0), picks)
    M = tl.max(tops, axis=0)
    w = tl.exp2((tops - M) * scale)
    total = tl.sum((sums * w).to(tl.float64), axis=0)
    chosen = 0
    rest = tl.load(u_ptr + row)
    if greedy:
        chosen = tl.argmax(bests, axis=0, tie_break_left=True)
    else:
        mass = (picks * w).to(tl.float64)
        upto = tl.cumsum(mass, axis=0)
        target = rest * tl.sum(mass, axis=0)
        last = tl.max(tl.where(mass > 0.0, c, 0), axis=0)  # rounding must never pick a forbidden token
        chosen = tl.minimum(tl.sum((upto <= target).to(tl.int32), axis=0), last)
        rest = target - tl.sum(tl.where(c == chosen, upto - mass, 0.0), axis=0)
    o = chosen * CHUNK + i
    x = tl.load(x_ptr + o, mask=o < V, other=-float("inf")).to(tl.float32)
    allowed = (o >= low) & (o < high) & (o < V)
    if greedy:
        place = tl.argmax(tl.where(allowed, x, LOWEST), axis=0, tie_break_left=True)
    else:
        e = tl.where(allowed, tl.exp2((x - M) * scale), 0.0).to(tl.float64)
        last = tl.max(tl.where(e > 0.0, i, 0), axis=0)
        place = tl.minimum(tl.sum((tl.cumsum(e, axis=0) <= rest).to(tl.int32), axis=0), last)
    own = tl.sum(tl.where(i == place, x, 0.0), axis=0)
    tl.store(token_ptr + row, (chosen * CHUNK + place).to(tl.int64))
    tl.store(logprob_ptr + row, ((own - M) * scale - tl.log2(total.to(tl.float32))) * LN2)


def triton_sample(
    logits_BV: torch.Tensor, u_B: torch.Tensor, temperature_B: torch.Tensor, low_B: torch.Tensor, high_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `sample_tokens`."""
    rows, vocab = logits_BV.shape
    token_B = torch.empty(rows, dtype=torch.int64, device=logits_BV.device)
    logprob_B = torch.empty(rows, dtype=torch.float32, device=logits_BV.device)
    chunk = 4096 if vocab > 8192 else max(16, min(1024, triton.next_power_of_2(vocab)))
    if rows:
        _sample_kernel[(rows,)](
            logits_BV, u_B, temperature_B, low_B, high_B, token_B, logprob_B, logits_BV.stride(0), vocab,
            CHUNK=chunk, CHUNKS=triton.next_power_of_2(triton.cdiv(vocab, chunk)), num_warps=8 if chunk == 4096 else 4,
        )  # fmt: skip
    return token_B, logprob_B
