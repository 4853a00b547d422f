"""Triton side of kernels/logprob.py: one pass over the row forward, one read and one write backward.

Shape suffixes: N rows (tokens), V vocabulary (this rank's shard), W ranks, 4 the statistics of one row.

Forward: each thread keeps its own running (maximum, sum, weighted sum) over 16-byte vectors, so the loop has no
reduction across threads; the tile that holds the target is taken last, with the target left out (see kernels/logprob.py
for why).

An odd vocabulary puts most rows off the 16-byte grid. Such a row is walked from the last grid point before it (`shift`
logits early, which are the previous row's and left out), so that whole vectors are read; the few logits after its last
whole vector come apart.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from ..batch_invariant import is_batch_invariant
from ..dispatch import cdiv
from ..vocab import Shard, gather_stats, vocab_shard

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _fold(m, l, s, x, scale, ENT: tl.constexpr):
    """Per-thread online softmax over one tile [RB, K]; s is the sum of 2^g g over the gaps g (in bits) to the running
    maximum.

    A logit of -inf makes s NaN (0 * -inf), which `_row_again` mends: cheaper than an instruction more for every logit.
    """
    mn = tl.maximum(m, tl.max(x, axis=1))
    drop = (m - mn) * scale
    a = tl.exp2(drop)
    g = (x - mn[:, None]) * scale
    e = tl.exp2(g)
    if ENT:
        s = a * (s + l * drop) + tl.sum(e * g, axis=1)
    l = l * a + tl.sum(e, axis=1)
    return mn, l, s


@triton.jit
def _without(x, keep):
    # a finite number below LOWEST: its weight is 0 and so is weight times gap
    return tl.where(keep, x.to(tl.float32), 2.0 * LOWEST)


@triton.jit
def _add_both(a1, b1, a2, b2):
    return a1 + a2, b1 + b2


@triton.jit
def _row_again(p, y, V, M, scale, RB: tl.constexpr, K: tl.constexpr):
    """R and S (in bits) of a rare row summed again, for its entropy: where one token that is not the target holds most
    of the mass, R is summed without it, else no digits are left; and logits of -inf add nothing."""
    offs = tl.arange(0, RB)[:, None] * K + tl.arange(0, K)[None, :]
    rest = tl.zeros([RB], tl.float32)
    ties = tl.zeros([RB], tl.float32)
    s = tl.zeros([RB], tl.float32)
    for i in range(tl.cdiv(V, RB * K)):
        o = i * (RB * K) + offs
        x = _without(tl.load(p + o, mask=o < V, other=0.0), (o < V) & (o != y))
        g = tl.maximum((x - M) * scale, -200.0, propagate_nan=tl.PropagateNan.ALL)
        e = tl.exp2(g)
        rest += tl.sum(tl.where(x == M, 0.0, e), axis=1)
        ties += tl.sum((x == M).to(tl.float32), axis=1)
        s += tl.sum(e * g, axis=1)
    rest, ties = tl.reduce((rest, ties), 0, _add_both)
    return rest + (ties - 1.0), tl.sum(s, axis=0)


@triton.jit
def _row_stats(x_ptr, begin, y, V, scale, RB: tl.constexpr, K: tl.constexpr, ENT: tl.constexpr, ODD: tl.constexpr):
    """(M, R, S, x_t) of the row at x_ptr + begin, as in the reference; y is the target's column or -1 when another rank
    owns it.

    The target is left out after loading, not by the load's mask, which would break the 16-byte loads up.
    """
    BLOCK: tl.constexpr = RB * K
    offs = tl.arange(0, RB)[:, None] * K + tl.arange(0, K)[None, :]
    m = tl.full([RB], LOWEST, tl.float32)
    l = tl.zeros([RB], tl.float32)
    s = tl.zeros([RB], tl.float32)
    p = x_ptr + begin
    xt = tl.load(p + tl.maximum(y, 0)).to(tl.float32)
    row, column = p, y
    if ODD:  # columns are counted from the grid point
        shift = (begin % K).to(tl.int32)
        p = x_ptr + begin // K * K
        end = V + shift
        y = tl.where(y < 0, -1, y + shift)
        whole = end // K * K  # the end of the last whole vector
        full = end // BLOCK
        first = tl.minimum(full, 1)
        rest = whole + tl.arange(0, RB)[:, None]
        few = tl.load(p + rest, mask=rest < end, other=0.0)
        m, l, s = _fold(m, l, s, _without(few, (rest < end) & (rest >= shift) & (rest != y)), scale, ENT)
        if full * BLOCK < whole:
            o = full * BLOCK + offs
            x = tl.load(p + o, mask=o < whole, other=0.0)
            m, l, s = _fold(m, l, s, _without(x, (o < whole) & (o >= shift) & (o != y)), scale, ENT)
        if full > 0:
            m, l, s = _fold(m, l, s, _without(tl.load(p + offs), (offs >= shift) & (offs != y)), scale, ENT)
        special = tl.where((y < 0) | (y < first * BLOCK), full, y // BLOCK)
    else:
        full = V // BLOCK
        first = 0
        if full * BLOCK < V:  # the ragged end first: its address waits for nothing
            o = full * BLOCK + offs
            x = tl.load(p + o, mask=o < V, other=0.0)
            m, l, s = _fold(m, l, s, _without(x, (o < V) & (o != y)), scale, ENT)
        special = tl.where(y < 0, full, y // BLOCK)
    # every full tile but the target's
    for i in range(first, tl.where(special < full, full - 1, full)):
        start = (i + (i >= special).to(tl.int32)) * BLOCK
        x = tl.load(p + start + offs).to(tl.float32)
        m, l, s = _fold(m, l, s, x, scale, ENT)
    if special < full:
        o = special * BLOCK + offs
        m, l, s = _fold(m, l, s, _without(tl.load(p + o), o != y), scale, ENT)
    M = tl.max(m, axis=0)
    drop = (m - M) * scale
    w = tl.exp2(drop)
    xt = tl.where(column < 0, -float("inf"), xt)
    if ENT:
        R, S = tl.reduce((l * w, w * (s + l * drop)), 0, _add_both)
        R -= 1.0
        # Above a tenth the entropy is large enough for R's absolute error of 1e-7; a NaN means logits of -inf, or
        # really a NaN.
        if ((R < 0.1) & (R > -0.5) & (xt < M)) | (S != S):
            R, S = _row_again(row, column, V, M, scale, RB, K)
        S = S * LN2
    else:
        R = tl.sum(l * w, axis=0) - 1.0
        S = 0.0
    return M, R, S, xt


@triton.jit
def _exp(z):
    """exp of a non-positive fp64 number to fp32 accuracy: the reduction is done in fp64, the power in fp32."""
    z = tl.where(z < -200.0, -200.0, z)
    n = tl.floor(z * 1.4426950408889634 + 0.5)
    f = (z - n * 0.6931471805599453).to(tl.float32)
    return tl.exp2(f * LOG2E) * tl.exp2(n.to(tl.float32))


@triton.jit
def _log1p(r):
    """log(1 + r), r >= 0: 2 atanh(r / (2 + r)) as a series while r <= 1, where the hardware logarithm loses digits."""
    q = tl.minimum(r, 1.0, propagate_nan=tl.PropagateNan.ALL)
    s = q / (2.0 + q)
    t = s * s
    series = 1.0 / 17.0
    series = series * t + 1.0 / 15.0
    series = series * t + 1.0 / 13.0
    series = series * t + 1.0 / 11.0
    series = series * t + 1.0 / 9.0
    series = series * t + 1.0 / 7.0
    series = series * t + 1.0 / 5.0
    series = series * t + 1.0 / 3.0
    series = series * t + 1.0
    return tl.where(r <= 1.0, 2.0 * s * series, tl.log2(1.0 + r) * LN2)


@triton.jit
def _expm1(x):
    """exp(x) - 1 for x <= 0: a series near zero, where the difference would cancel."""
    series = 1.0 / 40320.0
    series = series * x + 1.0 / 5040.0
    series = series * x + 1.0 / 720.0
    series = series * x + 1.0 / 120.0
    series = series * x + 1.0 / 24.0
    series = series * x + 1.0 / 6.0
    series = series * x + 0.5
    series = series * x + 1.0
    return tl.where(x > -0.5, series * x, tl.exp2(x * LOG2E) - 1.0)


@triton.jit
def _finish(M, R, S, xt, inv_t_hi, inv_t_lo):
    """(logprob, entropy, reference logit, log2 of the normaliser relative to it)."""
    raw = M.to(tl.float64) - xt.to(tl.float64)
    gap = raw * inv_t_hi + tl.where(tl.abs(raw) < 1.0e29, raw * inv_t_lo, 0.0)
    confident = gap <= 0.0
    down = tl.where(confident, gap, -gap)
    e = _exp(down)
    near = tl.where(down < -200.0, -200.0, down).to(tl.float32)
    mass = 1.0 + R
    excess = tl.where(confident, mass * e, R + e)
    log = _log1p(excess)
    logprob = tl.where(confident, -log, -gap.to(tl.float32) - log)
    s_all = tl.where(confident, e * (S + mass * near), S + e * near)
    entropy = log - s_all / (1.0 + excess)
    empty = ((xt == -float("inf")) & (mass == 0.0)) | (xt == float("inf")) | (M == float("inf"))
    nan = float("nan")
    log = tl.where(empty, nan, log)
    return tl.where(empty, nan, logprob), tl.where(empty, nan, entropy), tl.where(M > xt, M, xt), log * LOG2E


@triton.jit
def _stats_kernel(
    x_ptr, y_ptr, mask_ptr, out_ptr, stride, V, start, scale,
    RB: tl.constexpr, K: tl.constexpr, ENT: tl.constexpr, MASK: tl.constexpr, ODD: tl.constexpr,
):  # fmt: skip
    """One row a program. Nothing else happens here: the loop needs the registers for rows in flight."""
    row = tl.program_id(0).to(tl.int64)
    live = True
    if MASK:
        live = tl.load(mask_ptr + row) != 0
    if live:
        y = tl.load(y_ptr + row) - start
        y = tl.where((y >= 0) & (y < V), y, -1).to(tl.int32)
        M, R, S, xt = _row_stats(x_ptr, row * stride, y, V, scale, RB, K, ENT, ODD)
        tl.store(out_ptr + row * 4, M)
        tl.store(out_ptr + row * 4 + 1, R)
        tl.store(out_ptr + row * 4 + 2, S)
        tl.store(out_ptr + row * 4 + 3, xt)


@triton.jit
def _merged(stats_ptr, row, live, N, W, scale, ROWS: tl.constexpr):
    """The statistics of W shards as one, summed in rank order."""
    M = tl.full([ROWS], LOWEST, tl.float32)
    xt = tl.full([ROWS], -float("inf"), tl.float32)
    for w in range(W):
        p = stats_ptr + (w * N + row) * 4
        M = tl.maximum(M, tl.load(p, mask=live, other=LOWEST), propagate_nan=tl.PropagateNan.ALL)
        xt = tl.maximum(xt, tl.load(p + 3, mask=live, other=0.0), propagate_nan=tl.PropagateNan.ALL)
    R = tl.zeros([ROWS], tl.float32)
    S = tl.zeros([ROWS], tl.float32)
    taken = tl.zeros([ROWS], tl.int1)
    for w in range(W):
        p = stats_ptr + (w * N + row) * 4
        m, r, s = (
            tl.load(p, mask=live, other=LOWEST),
            tl.load(p + 1, mask=live, other=0.0),
            tl.load(p + 2, mask=live, other=0.0),
        )
        drop = (m - M) * scale
        a = tl.exp2(drop)
        own = (m == M) & (taken == 0)
        R += tl.where(own, r, (1.0 + r) * a)
        S += tl.where(own, s, a * (s + (1.0 + r) * drop * LN2))
        taken = taken | own
    return M, R, S, xt


@triton.jit
def _merge_kernel(stats_ptr, out_ptr, N, W, scale, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < N
    M, R, S, xt = _merged(stats_ptr, row, live, N, W, scale, ROWS)
    p = out_ptr + row * 4
    tl.store(p, M, mask=live)
    tl.store(p + 1, R, mask=live)
    tl.store(p + 2, S, mask=live)
    tl.store(p + 3, xt, mask=live)


@triton.jit
def _finish_kernel(
    stats_ptr,
    y_ptr,
    mask_ptr,
    out_ptr,
    N,
    W,
    plane,
    vocab,
    scale,
    inv_t_hi,
    inv_t_lo,
    ROWS: tl.constexpr,
    MASK: tl.constexpr,
):
    """Statistics of W shards to the four outputs; masked rows give 0, a target outside the vocabulary NaN."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ok = row < N
    live = ok
    if MASK:
        live = ok & (tl.load(mask_ptr + row, mask=ok, other=0) != 0)
    M, R, S, xt = _merged(stats_ptr, row, live, N, W, scale, ROWS)
    y = tl.load(y_ptr + row, mask=live, other=0)
    xt = tl.where((y >= 0) & (y < vocab), xt, float("nan"))
    logprob, entropy, reference, log2z = _finish(M, R, S, xt, inv_t_hi, inv_t_lo)
    tl.store(out_ptr + row, tl.where(live, logprob, 0.0), mask=ok)
    tl.store(out_ptr + plane + row, tl.where(live, entropy, 0.0), mask=ok)
    tl.store(out_ptr + 2 * plane + row, reference, mask=ok)
    tl.store(out_ptr + 3 * plane + row, log2z, mask=ok)


@triton.jit
def _tile_gradient(x, o, y, own, reference, log2z, constant, slope, scale, ENT: tl.constexpr, TARGET: tl.constexpr):
    """d(g logprob + ge entropy) / d logits of one tile: -p (constant + slope log2 p), and `own` at the target."""
    x = x.to(tl.float32)
    z = (x - reference) * scale - log2z
    if ENT:
        z = tl.maximum(z, -200.0, propagate_nan=tl.PropagateNan.ALL)
        d = -tl.exp2(z) * (constant + slope * z)
    else:
        d = -tl.exp2(z) * constant
    if TARGET:
        d = tl.where(o == y, own, d)
    return d


@triton.jit
def _backward_kernel(
    x_ptr, dx_ptr, y_ptr, saved_ptr, g_ptr, ge_ptr, mask_ptr, source_ptr, tiles, plane, stride, dstride, V, columns,
    start,
    scale, inv_t,
    BLOCK: tl.constexpr, ENT: tl.constexpr, MASK: tl.constexpr, MOVE: tl.constexpr, ODD: tl.constexpr,
):  # fmt: skip
    """One tile of a row a program. ODD counts columns from the grid point before the row, and leaves what does not fill
    a vector at either end of the row to the first tile's program."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    o = tile * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + row)
    live = g != 0.0
    ge = 0.0
    if ENT:
        ge = tl.load(ge_ptr + row)
        live = live | (ge != 0.0)
    if MASK:
        live = live & (tl.load(mask_ptr + row) != 0)
    source = row
    if MOVE:
        source = tl.load(source_ptr + row)
    begin, dbegin = source * stride, row * dstride
    valid, end = V, columns
    inside = o < columns
    if ODD:
        shift = (begin % 8).to(tl.int32)
        begin, dbegin = begin // 8 * 8, dbegin // 8 * 8
        valid, end = V + shift, columns + shift
        whole, last = (shift + 7) // 8 * 8, end // 8 * 8
        inside = (o >= whole) & (o < last)
        lane = tl.arange(0, 16)
        edge = tl.where(lane < 8, lane, last + lane - 8)
        outside = (edge < end) & tl.where(lane < 8, (edge >= shift) & (edge < whole), edge >= whole)
    out = dx_ptr + dbegin + o
    if live:
        y = (tl.load(y_ptr + row) - start).to(tl.int32)
        owned = (y >= 0) & (y < V)
        if ODD:
            y += shift
        logprob = tl.load(saved_ptr + row)
        entropy = tl.load(saved_ptr + plane + row)
        reference = tl.load(saved_ptr + 2 * plane + row)
        log2z = tl.load(saved_ptr + 3 * plane + row)
        x = tl.load(x_ptr + begin + o, mask=inside, other=0.0)
        constant, slope = g * inv_t, 0.0
        if ENT:
            constant, slope = (g + ge * entropy) * inv_t, ge * inv_t * LN2
        first = False
        if ODD:
            first = tile == 0
        if (owned & (y // BLOCK == tile)) | first:
            own = -g * _expm1(logprob)
            if ENT:
                own -= (
                    ge
                    * tl.exp2(logprob * LOG2E)
                    * (tl.maximum(logprob, LOWEST, propagate_nan=tl.PropagateNan.ALL) + entropy)
                )
            target = tl.where(owned, y, -1)
            d = _tile_gradient(x, o, target, own * inv_t, reference, log2z, constant, slope, scale, ENT, True)
            if ODD:
                x_edge = tl.load(x_ptr + begin + edge, mask=outside & first, other=0.0)
                d_edge = _tile_gradient(
                    x_edge, edge, target, own * inv_t, reference, log2z, constant, slope, scale, ENT, True
                )
                d_edge = tl.where(edge < valid, d_edge, 0.0)
                tl.store(dx_ptr + dbegin + edge, d_edge.to(dx_ptr.dtype.element_ty), mask=outside & first)
        else:
            d = _tile_gradient(x, o, y, 0.0, reference, log2z, constant, slope, scale, ENT, False)
        tl.store(out, tl.where(o < valid, d, 0.0).to(dx_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(out, tl.zeros([BLOCK], dx_ptr.dtype.element_ty), mask=inside)
        if ODD:
            tl.store(dx_ptr + dbegin + edge, tl.zeros([16], dx_ptr.dtype.element_ty), mask=outside & (tile == 0))


def split_float(value: float) -> tuple[float, float]:
    """A double as two fp32 numbers: Triton passes Python floats as fp32."""
    high = torch.tensor(value, dtype=torch.float32).item()
    return high, value - high


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def stats_config(vocab: int, entropy: bool, odd: bool = False) -> tuple[int, int, int | None]:
    """(vectors RB of eight logits a tile, warps, register limit): from benchmarks/tune_kernels.py on an H200, see
    docs/lab/kernels.md.

    With an odd vocabulary 48 registers spill.
    """
    few = 64 if odd else 48
    if vocab >= 65536:
        return (512, 8, few) if entropy else (1024, 8, None)
    if entropy:
        return (128, 2, few) if vocab >= 16384 else (128, 1, 64)
    return 128, 2, 32


def launch_stats(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    shard: Shard,
    temperature: float,
    mask_N: torch.Tensor | None,
    entropy: bool,
    out_N4: torch.Tensor,
    config: tuple[int, int, int | None] | None = None,
) -> None:
    """Fill `out_N4` with this shard's statistics of every row."""
    N = len(targets_N)
    if N == 0:
        return
    # where a row begins in memory then decides which logits are added first, so not where its bits may not depend on
    # the batch
    odd = bool(logits_NV.stride(0) % 16 or shard.valid % 16) and not is_batch_invariant()
    rows, warps, registers = config or stats_config(shard.valid, entropy, odd)
    _stats_kernel[(N,)](
        logits_NV, targets_N, targets_N if mask_N is None else mask_N, out_N4, logits_NV.stride(0), shard.valid,
        shard.start,
        1.4426950408889634 / temperature,
        RB=rows, K=8, ENT=entropy, MASK=mask_N is not None,
        ODD=odd, num_warps=warps, maxnreg=registers,
    )  # fmt: skip


def merge_shards(stats_WN4: torch.Tensor, temperature: float) -> torch.Tensor:
    """[N, 4]: the statistics of several column ranges as those of one."""
    W, N, _ = stats_WN4.shape
    out_N4 = torch.empty_like(stats_WN4[0])
    if N:
        _merge_kernel[(cdiv(N, 64),)](stats_WN4, out_N4, N, W, 1.4426950408889634 / temperature, ROWS=64, num_warps=2)
    return out_N4


def finish_rows(
    stats_WN4: torch.Tensor,
    targets_N: torch.Tensor,
    vocab: int,
    temperature: float,
    mask_N: torch.Tensor | None,
    out_4N: torch.Tensor,
) -> None:
    """Log-prob, entropy, reference logit and log2 normaliser, the rows of `out_4N`, from the shards' statistics."""
    W, N, _ = stats_WN4.shape
    if N == 0:
        return
    high, low = split_float(1.0 / temperature)
    _finish_kernel[(cdiv(N, 64),)](
        stats_WN4, targets_N, targets_N if mask_N is None else mask_N, out_4N, N, W, out_4N.stride(0), vocab,
        1.4426950408889634 / temperature, high, low, ROWS=64, MASK=mask_N is not None, num_warps=2,
    )  # fmt: skip


def score_logits(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    shard: Shard,
    temperature: float,
    mask_N: torch.Tensor | None,
    entropy: bool,
    group: dist.ProcessGroup | None,
    out_4N: torch.Tensor,
) -> None:
    """Statistics, the one gather when the vocabulary is split, and the four outputs."""
    stats_N4 = torch.empty((len(targets_N), 4), dtype=torch.float32, device=logits_NV.device)
    launch_stats(logits_NV, targets_N, shard, temperature, mask_N, entropy, stats_N4)
    if group is not None and mask_N is not None:
        stats_N4.masked_fill_(~mask_N.bool()[:, None], 0.0)  # never written; what is sent should not be garbage
    stats_WN4 = stats_N4[None] if group is None else gather_stats(stats_N4, group)
    finish_rows(stats_WN4, targets_N, shard.vocab, temperature, mask_N, out_4N)


def launch_backward(
    logits_NV: torch.Tensor,
    out_NV: torch.Tensor,
    targets_N: torch.Tensor,
    saved_4N: torch.Tensor,
    grad_N: torch.Tensor,
    grad_entropy_N: torch.Tensor | None,
    shard: Shard,
    temperature: float,
    mask_N: torch.Tensor | None = None,
    source_N: torch.Tensor | None = None,
    config: tuple[int, int] = (1024, 2),
) -> None:
    """Write d logits into `out_NV`, which may be `logits_NV`; rows without a gradient are not read.

    Row i of `out_NV` comes from row `source_N[i]` of the logits; in place, no row may be both a source and another's
    place.
    """
    N, columns = out_NV.shape
    if N == 0:
        return
    block, warps = config
    # rows off the 16-byte grid, each as far off in the logits as in the gradient
    odd = source_N is None and logits_NV.stride(0) == out_NV.stride(0) and bool(out_NV.stride(0) % 16 or columns % 16)
    tiles = cdiv(columns + 7 * odd, block)
    _backward_kernel[(tiles * N,)](
        logits_NV, out_NV, targets_N, saved_4N, grad_N, grad_N if grad_entropy_N is None else grad_entropy_N,
        targets_N if mask_N is None else mask_N, targets_N if source_N is None else source_N,
        tiles, saved_4N.stride(0), logits_NV.stride(0), out_NV.stride(0),
        shard.valid, columns, shard.start,
        1.4426950408889634 / temperature, 1.0 / temperature,
        BLOCK=block, ENT=grad_entropy_N is not None, MASK=mask_N is not None, MOVE=source_N is not None, ODD=odd,
        num_warps=warps,
    )  # fmt: skip


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_NV, targets_N, temperature, mask_N, entropy, inplace, group, shard):
        saved_4N = torch.empty((4, len(targets_N)), dtype=torch.float32, device=logits_NV.device)
        score_logits(logits_NV, targets_N, shard, temperature, mask_N, entropy, group, saved_4N)
        ctx.save_for_backward(logits_NV, targets_N, mask_N, saved_4N)
        ctx.options = (shard, temperature, inplace)
        return saved_4N[0], saved_4N[1] if entropy else None

    @staticmethod
    def backward(ctx, grad_N, grad_entropy_N):
        logits_NV, targets_N, mask_N, saved_4N = ctx.saved_tensors
        shard, temperature, inplace = ctx.options
        out_NV = logits_NV.detach() if inplace else torch.empty_like(logits_NV)
        grad_entropy_N = None if grad_entropy_N is None else grad_entropy_N.contiguous()
        launch_backward(
            logits_NV, out_NV, targets_N, saved_4N, grad_N.contiguous(), grad_entropy_N, shard, temperature, mask_N
        )
        return out_NV, None, None, None, None, None, None, None, None


def triton_token_logprob(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    mask_N: torch.Tensor | None = None,
    entropy: bool = False,
    inplace_backward: bool = False,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `token_logprob`."""
    if logits_NV.stride(1) != 1:
        logits_NV = logits_NV.contiguous()
    shard = vocab_shard(logits_NV.shape[1], group, vocab_size)
    return _TokenLogprob.apply(
        logits_NV, targets_N.contiguous(), temperature, mask_N, entropy, inplace_backward, group, shard
    )
