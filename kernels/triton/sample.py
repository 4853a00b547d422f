"""Triton side of kernels/sample.py: one read of the row, and a second one of the eighth of it that holds the chosen
token.

A row is parts, a part is tiles, a tile is 16-byte vectors. The first kernel sums up every part; its threads keep
running values of their own, so the long loop has no reduction across threads. The second goes down these levels, each
time with what is left of the random number. Apart, because its registers would halve the number of the first one's
programs in flight. Top-k and top-p come before both: they search the least logit that stays, and the two kernels then
take the logits below it as not allowed. Shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import cdiv, power_of_2

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
def _allowed_tile(x_ptr, o, V, low, high, cut):
    # the mask of the load stays simple, so that it is one of whole vectors
    x = tl.load(x_ptr + o, mask=o < V, other=-float("inf")).to(tl.float32)
    return tl.where((o >= low) & (o < high) & (x >= cut), x, -float("inf"))


@triton.jit
def _weigh(x_ptr, o, V, low, high, floor, M, scale, TOP_P: tl.constexpr):
    """(logits as integers in the same order, what each counts: its probability times a constant, or one). Below
    `floor`: nothing.
    """
    x = tl.load(x_ptr + o, mask=o < V, other=-float("inf")).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    number = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    counts = (o >= low) & (o < high) & (number >= floor)
    weight = tl.where(counts, 1.0, 0.0)
    if TOP_P:
        weight = tl.where(counts, tl.exp2((x - M) * scale), 0.0)
    return number, weight


@triton.jit
def _search(
    x_ptr,
    V,
    low,
    high,
    floor,
    M,
    scale,
    target,
    TOP_P: tl.constexpr,
    RB: tl.constexpr,
    K: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """The largest number with a weight of at least `target` at or above it, two bits of it in each pass over the
    row.
    """
    inner = tl.arange(0, RB)[:, None] * K + tl.arange(0, K)[None, :]
    found = tl.full([], -2147483648, tl.int32)
    for place in range(DIGITS):
        step = tl.full([], 1, tl.int32) << (30 - 2 * place)
        one, two, three = found + step, found + step + step, found + step + step + step
        a = tl.zeros([RB], tl.float32)
        b = tl.zeros([RB], tl.float32)
        c = tl.zeros([RB], tl.float32)
        for start in range(0, V, RB * K):
            number, weight = _weigh(x_ptr, start + inner, V, low, high, floor, M, scale, TOP_P)
            a += tl.sum(tl.where(number >= one, weight, 0.0), axis=1)
            b += tl.sum(tl.where(number >= two, weight, 0.0), axis=1)
            c += tl.sum(tl.where(number >= three, weight, 0.0), axis=1)
        reached = (tl.sum(a, axis=0) >= target).to(tl.int32) + (tl.sum(b, axis=0) >= target).to(tl.int32)
        found += step * (reached + (tl.sum(c, axis=0) >= target).to(tl.int32))
    return found


@triton.jit
def _cut_kernel(
    x_ptr,
    t_ptr,
    low_ptr,
    high_ptr,
    k_ptr,
    p_ptr,
    cut_ptr,
    stride,
    V,
    RB: tl.constexpr,
    K: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """The least logit of a row that top-k, then top-p of what is left, let stay."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride
    low, high = tl.load(low_ptr + row).to(tl.int32), tl.load(high_ptr + row).to(tl.int32)
    k, share, temperature = tl.load(k_ptr + row), tl.load(p_ptr + row), tl.load(t_ptr + row)
    floor = tl.full([], -2139095041, tl.int32)  # minus infinity
    if temperature != 0.0:
        if k > 0:
            floor = tl.maximum(
                floor, _search(x_ptr, V, low, high, floor, 0.0, 1.0, k.to(tl.float32), False, RB, K, DIGITS)
            )
        if share < 1.0:
            inner = tl.arange(0, RB)[:, None] * K + tl.arange(0, K)[None, :]
            top = tl.full([RB], LOWEST, tl.float32)
            for start in range(0, V, RB * K):
                top = tl.maximum(top, tl.max(_allowed_tile(x_ptr, start + inner, V, low, high, LOWEST), axis=1))
            M, scale = tl.max(top, axis=0), _scale(temperature)
            total = tl.zeros([RB], tl.float32)
            for start in range(0, V, RB * K):
                _, weight = _weigh(x_ptr, start + inner, V, low, high, floor, M, scale, True)
                total += tl.sum(weight, axis=1)
            target = share * tl.sum(total, axis=0)
            floor = tl.maximum(floor, _search(x_ptr, V, low, high, floor, M, scale, target, True, RB, K, DIGITS))
    bits = tl.where(floor >= 0, floor, floor ^ 0x7FFFFFFF)
    tl.store(cut_ptr + row, bits.to(tl.float32, bitcast=True))


@triton.jit
def _scale(temperature):
    return LOG2E / tl.where(temperature == 0.0, 1.0, temperature)


@triton.jit
def _stats_kernel(
    x_ptr, t_ptr, low_ptr, high_ptr, cut_ptr, stats_ptr, stride, V, RB: tl.constexpr, K: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Of one part of a row: largest logit, sum of 2^((x - largest) scale), the same sum over the allowed ids, and
    their largest logit.
    """
    row, n = tl.program_id(1).to(tl.int64), tl.program_id(0)
    x_ptr += row * stride
    low, high = tl.load(low_ptr + row).to(tl.int32), tl.load(high_ptr + row).to(tl.int32)
    cut = tl.load(cut_ptr + row) if CUT else -float("inf")
    restricted = (low > 0) | (high < V) | (cut > -float("inf"))
    scale = _scale(tl.load(t_ptr + row))
    inner = tl.arange(0, RB)[:, None] * K + tl.arange(0, K)[None, :]
    m = tl.full([RB], LOWEST, tl.float32)
    b = tl.full([RB], LOWEST, tl.float32)
    l = tl.zeros([RB], tl.float32)
    p = tl.zeros([RB], tl.float32)
    for j in range(TILES):
        o = (n * TILES + j) * (RB * K) + inner
        x = tl.load(x_ptr + o, mask=o < V, other=-float("inf")).to(tl.float32)
        top = tl.maximum(m, tl.max(x, axis=1))
        a = tl.exp2((m - top) * scale)
        e = tl.exp2((x - top[:, None]) * scale)
        l = l * a + tl.sum(e, axis=1)
        if restricted:
            allowed = (o >= low) & (o < high) & (x >= cut)
            p = p * a + tl.sum(tl.where(allowed, e, 0.0), axis=1)
            b = tl.maximum(b, tl.max(tl.where(allowed, x, LOWEST), axis=1))
        m = top
    top = tl.max(m, axis=0)
    w = tl.exp2((m - top) * scale)
    total = tl.sum(l * w, axis=0)
    pick, best = total, top
    if restricted:
        pick, best = tl.sum(p * w, axis=0), tl.max(b, axis=0)
    out = stats_ptr + (row * PARTS + n) * 4
    tl.store(out, top)
    tl.store(out + 1, total)
    tl.store(out + 2, pick)
    tl.store(out + 3, best)


@triton.jit
def _pick_kernel(
    x_ptr, u_ptr, t_ptr, low_ptr, high_ptr, cut_ptr, stats_ptr, token_ptr, logprob_ptr, stride, V, RB: tl.constexpr,
    K: tl.constexpr,
    TILES: tl.constexpr, TP: tl.constexpr, PARTS: tl.constexpr, PP: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = RB * K
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride
    temperature = tl.load(t_ptr + row)
    low, high = tl.load(low_ptr + row).to(tl.int32), tl.load(high_ptr + row).to(tl.int32)
    cut = tl.load(cut_ptr + row) if CUT else -float("inf")
    scale = _scale(temperature)
    i, k = tl.arange(0, RB), tl.arange(0, K)
    inner = i[:, None] * K + k[None, :]
    part, tile = tl.arange(0, PP), tl.arange(0, TP)
    stats = stats_ptr + (row * PARTS + part) * 4
    tops = tl.load(stats, mask=part < PARTS, other=LOWEST)
    M = tl.max(tops, axis=0)
    w = tl.exp2((tops - M) * scale)
    total = tl.sum(tl.load(stats + 1, mask=part < PARTS, other=0.0) * w, axis=0)
    if temperature == 0.0:
        bests = tl.load(stats + 3, mask=part < PARTS, other=LOWEST)
        own = tl.max(bests, axis=0)
        n = tl.argmax(bests, axis=0, tie_break_left=True)
        token = V - 1
        for j in range(TILES):
            o = (n * TILES + j) * BLOCK + inner
            x = _allowed_tile(x_ptr, o, V, low, high, cut)
            token = tl.minimum(token, tl.min(tl.min(tl.where(x == own, o, V - 1), axis=1), axis=0))
    else:
        mass = tl.load(stats + 2, mask=part < PARTS, other=0.0) * w
        n, rest = _descend(mass, part, tl.load(u_ptr + row) * tl.sum(mass.to(tl.float64), axis=0))
        masses = tl.zeros([TP], tl.float32)
        for j in range(TILES):
            x = _allowed_tile(x_ptr, (n * TILES + j) * BLOCK + inner, V, low, high, cut)
            masses = tl.where(tile == j, tl.sum(tl.sum(tl.exp2((x - M) * scale), axis=1), axis=0), masses)
        j, rest = _descend(masses, tile, rest)
        o = (n * TILES + j) * BLOCK + inner
        x = _allowed_tile(x_ptr, o, V, low, high, cut)
        e = tl.exp2((x - M) * scale)
        at, rest = _descend(tl.sum(e, axis=1), i, rest)
        in_vector, _ = _descend(tl.sum(tl.where(i[:, None] == at, e, 0.0), axis=0), k, rest)
        token = (n * TILES + j) * BLOCK + at * K + in_vector
        own = tl.sum(tl.sum(tl.where(o == token, x, 0.0), axis=1), axis=0)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logprob_ptr + row, ((own - M) * scale - tl.log2(total)) * LN2)


def triton_sample(
    logits_BV: torch.Tensor,
    u_B: torch.Tensor,
    temperature_B: torch.Tensor,
    low_B: torch.Tensor,
    high_B: torch.Tensor,
    cuts: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `sample_tokens`."""
    rows, vocab = logits_BV.shape
    token_B = torch.empty(rows, dtype=torch.int64, device=logits_BV.device)
    logprob_B = torch.empty(rows, dtype=torch.float32, device=logits_BV.device)
    lines, warps = (512, 8) if vocab > 32768 else (128, 4)
    tiles = cdiv(cdiv(vocab, lines * 8), 8)
    parts = cdiv(vocab, lines * 8 * tiles)
    stats_BP4 = torch.empty((rows, parts, 4), dtype=torch.float32, device=logits_BV.device)
    cut_B, stride = logprob_B, logits_BV.stride(0)  # read where there are cuts only
    if rows:
        if cuts is not None:
            # bf16 is a float's upper half
            cut_B, digits = torch.empty_like(logprob_B), 8 if logits_BV.dtype == torch.bfloat16 else 16
            _cut_kernel[(rows,)](
                logits_BV,
                temperature_B,
                low_B,
                high_B,
                *cuts,
                cut_B,
                stride,
                vocab,
                RB=lines,
                K=8,
                DIGITS=digits,
                num_warps=warps,
            )
        shape = {"RB": lines, "K": 8, "TILES": tiles, "PARTS": parts, "CUT": cuts is not None, "num_warps": warps}
        _stats_kernel[(parts, rows)](logits_BV, temperature_B, low_B, high_B, cut_B, stats_BP4, stride, vocab, **shape)
        _pick_kernel[(rows,)](
            logits_BV, u_B, temperature_B, low_B, high_B, cut_B, stats_BP4, token_B, logprob_B, stride, vocab,
            TP=power_of_2(tiles), PP=power_of_2(parts), **shape,
        )  # fmt: skip
    return token_B, logprob_B
