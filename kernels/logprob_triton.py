"""Triton side of kernels/logprob.py: one pass over the row forward, one read and one write backward.

Shape suffixes: N rows (tokens), V vocabulary (this rank's shard), W ranks, 4 the statistics of one row.

Forward: each thread keeps its own running (maximum, sum, weighted sum) over 16-byte vectors, so the loop has no reduction across
threads; the tile that holds the target is taken last, with the target left out (see kernels/logprob.py for why).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from .logprob import Shard, gather_stats, vocab_shard

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _tanh(y):
    # a Pade form where 1 - 2 / (exp(2y) + 1) would cancel
    y2 = y * y
    small = y * (10395.0 + y2 * (1260.0 + 21.0 * y2)) / (10395.0 + y2 * (4725.0 + y2 * (210.0 + y2)))
    large = 1.0 - 2.0 / (tl.exp2(2.0 * LOG2E * y) + 1.0)
    return tl.where(tl.abs(y) < 1.0, small, large)


@triton.jit
def _capped(x, softcap, CAP: tl.constexpr):
    x = x.to(tl.float32)
    if CAP:
        x = softcap * _tanh(x / softcap)
    return x


@triton.jit
def _fold(m, l, s, x, scale, ENT: tl.constexpr, SAFE: tl.constexpr):
    """Per-thread online softmax over one tile [RB, K]; s is the sum of 2^g g over the gaps g (in bits) to the running maximum.

    Without SAFE a logit of -inf makes s NaN (0 * -inf), which the caller repairs: one instruction less per logit.
    """
    mn = tl.maximum(m, tl.max(x, axis=1))
    drop = (m - mn) * scale
    a = tl.exp2(drop)
    g = (x - mn[:, None]) * scale
    if ENT:
        if SAFE:
            g = tl.maximum(g, -200.0, propagate_nan=tl.PropagateNan.ALL)
        e = tl.exp2(g)
        s = a * (s + l * drop) + tl.sum(e * g, axis=1)
    else:
        e = tl.exp2(g)
    l = l * a + tl.sum(e, axis=1)
    return mn, l, s


@triton.jit
def _masked_tile(p, o, V, y, softcap, CAP: tl.constexpr):
    keep = (o < V) & (o != y)
    return tl.where(keep, _capped(tl.load(p + o, mask=keep, other=0.0), softcap, CAP), -float("inf"))


@triton.jit
def _row_stats(p, y, V, scale, softcap, RB: tl.constexpr, K: tl.constexpr, ENT: tl.constexpr, CAP: tl.constexpr):
    """(M, R, S, x_t) of the row at p, as in the reference; y is the target's column or -1 when another rank owns it."""
    BLOCK: tl.constexpr = RB * K
    offs = tl.arange(0, RB)[:, None] * K + tl.arange(0, K)[None, :]
    m = tl.full([RB], LOWEST, tl.float32)
    l = tl.zeros([RB], tl.float32)
    s = tl.zeros([RB], tl.float32)
    full = V // BLOCK
    special = tl.where(y < 0, full, y // BLOCK)
    # every full tile but the target's, without masks
    for i in range(tl.where(special < full, full - 1, full)):
        start = (i + (i >= special).to(tl.int32)) * BLOCK
        x = _capped(tl.load(p + start + offs), softcap, CAP)
        m, l, s = _fold(m, l, s, x, scale, ENT, False)
    # the target's tile, and the ragged end when that is another
    if y >= 0:
        m, l, s = _fold(m, l, s, _masked_tile(p, special * BLOCK + offs, V, y, softcap, CAP), scale, ENT, True)
    if (full * BLOCK < V) & ((y < 0) | (special != full)):
        m, l, s = _fold(m, l, s, _masked_tile(p, full * BLOCK + offs, V, y, softcap, CAP), scale, ENT, True)
    M = tl.max(m, axis=0)
    drop = (m - M) * scale
    w = tl.exp2(drop)
    L = tl.sum(l * w, axis=0)
    R = L - 1.0
    S = 0.0
    xt = _capped(tl.load(p + tl.maximum(y, 0)), softcap, CAP)
    xt = tl.where(y < 0, -float("inf"), xt)
    if ENT:
        S = tl.sum(w * (s + l * drop), axis=0)
        # Rare rows are summed again. Those where one other token holds most of the mass: without it, else R has no digits left.
        # And those with logits of -inf, whose S is NaN so far (as it stays when the row really holds a NaN).
        if ((R < 0.5) & (R > -0.5) & (xt < M)) | (S != S):
            rest = tl.zeros([RB], tl.float32)
            ties = tl.zeros([RB], tl.float32)
            s = tl.zeros([RB], tl.float32)
            for i in range(tl.cdiv(V, BLOCK)):
                x = _masked_tile(p, i * BLOCK + offs, V, y, softcap, CAP)
                g = tl.maximum((x - M) * scale, -200.0, propagate_nan=tl.PropagateNan.ALL)
                e = tl.exp2(g)
                rest += tl.sum(tl.where(x == M, 0.0, e), axis=1)
                ties += tl.sum((x == M).to(tl.float32), axis=1)
                s += tl.sum(e * g, axis=1)
            R = tl.sum(rest, axis=0) + (tl.sum(ties, axis=0) - 1.0)
            S = tl.sum(s, axis=0)
    return M, R, S * LN2, xt


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
def _forward_kernel(
    x_ptr, y_ptr, mask_ptr, out_ptr, plane, stride, V, start, scale, softcap, inv_t_hi, inv_t_lo,
    RB: tl.constexpr, K: tl.constexpr, ENT: tl.constexpr, CAP: tl.constexpr, MASK: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    live = True
    if MASK:
        live = tl.load(mask_ptr + row) != 0
    if live:
        y = tl.load(y_ptr + row) - start
        owned = (y >= 0) & (y < V)
        y = tl.where(owned, y, -1).to(tl.int32)
        M, R, S, xt = _row_stats(x_ptr + row * stride, y, V, scale, softcap, RB, K, ENT, CAP)
        if PARTIAL:
            tl.store(out_ptr + row * 4, M)
            tl.store(out_ptr + row * 4 + 1, R)
            tl.store(out_ptr + row * 4 + 2, S)
            tl.store(out_ptr + row * 4 + 3, xt)
        else:
            xt = tl.where(owned, xt, float("nan"))  # an id outside the vocabulary: say so
            logprob, entropy, reference, log2z = _finish(M, R, S, xt, inv_t_hi, inv_t_lo)
            tl.store(out_ptr + row, logprob)
            tl.store(out_ptr + plane + row, entropy)
            tl.store(out_ptr + 2 * plane + row, reference)
            tl.store(out_ptr + 3 * plane + row, log2z)
    else:
        for i in tl.static_range(4):
            tl.store(out_ptr + row * 4 + i if PARTIAL else out_ptr + i * plane + row, 0.0)


@triton.jit
def _merge_kernel(stats_ptr, out_ptr, N, W, scale, inv_t_hi, inv_t_lo, BLOCK: tl.constexpr):
    """Statistics of W shards to the four outputs, summed in rank order."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = row < N
    M = tl.full([BLOCK], LOWEST, tl.float32)
    xt = tl.full([BLOCK], -float("inf"), tl.float32)
    for w in range(W):
        p = stats_ptr + (w * N + row) * 4
        M = tl.maximum(M, tl.load(p, mask=ok, other=LOWEST), propagate_nan=tl.PropagateNan.ALL)
        xt = tl.maximum(xt, tl.load(p + 3, mask=ok, other=0.0), propagate_nan=tl.PropagateNan.ALL)
    R = tl.zeros([BLOCK], tl.float32)
    S = tl.zeros([BLOCK], tl.float32)
    taken = tl.zeros([BLOCK], tl.int1)
    for w in range(W):
        p = stats_ptr + (w * N + row) * 4
        m, r, s = tl.load(p, mask=ok, other=LOWEST), tl.load(p + 1, mask=ok, other=0.0), tl.load(p + 2, mask=ok, other=0.0)
        drop = (m - M) * scale
        a = tl.exp2(drop)
        own = (m == M) & (taken == 0)
        R += tl.where(own, r, (1.0 + r) * a)
        S += tl.where(own, s, a * (s + (1.0 + r) * drop * LN2))
        taken = taken | own
    # A NaN maximum never equals itself: its row has R = NaN through a, as it must
    logprob, entropy, reference, log2z = _finish(M, R, S, xt, inv_t_hi, inv_t_lo)
    tl.store(out_ptr + row, logprob, mask=ok)
    tl.store(out_ptr + N + row, entropy, mask=ok)
    tl.store(out_ptr + 2 * N + row, reference, mask=ok)
    tl.store(out_ptr + 3 * N + row, log2z, mask=ok)


@triton.jit
def _tile_gradient(
    x, o, y, own, reference, log2z, constant, slope, scale, softcap, ENT: tl.constexpr, CAP: tl.constexpr, TARGET: tl.constexpr
):
    """d(g logprob + ge entropy) / d logits of one tile: -p (constant + slope log2 p), and `own` at the target."""
    x = x.to(tl.float32)
    if CAP:
        t = _tanh(x / softcap)
        x = softcap * t
    z = (x - reference) * scale - log2z
    if ENT:
        z = tl.maximum(z, -200.0, propagate_nan=tl.PropagateNan.ALL)
        d = -tl.exp2(z) * (constant + slope * z)
    else:
        d = -tl.exp2(z) * constant
    if TARGET:
        d = tl.where(o == y, own, d)
    if CAP:
        d = d * (1.0 - t * t)
    return d


@triton.jit
def _backward_kernel(
    x_ptr, dx_ptr, y_ptr, saved_ptr, g_ptr, ge_ptr, mask_ptr, plane, stride, dstride, V, columns, start, scale, inv_t, softcap,
    BLOCK: tl.constexpr, ENT: tl.constexpr, CAP: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    o = tile * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + row)
    live = g != 0.0
    ge = 0.0
    if ENT:
        ge = tl.load(ge_ptr + row)
        live = live | (ge != 0.0)
    if MASK:
        live = live & (tl.load(mask_ptr + row) != 0)
    out = dx_ptr + row * dstride + o
    if live:
        y = (tl.load(y_ptr + row) - start).to(tl.int32)
        logprob = tl.load(saved_ptr + row)
        entropy = tl.load(saved_ptr + plane + row)
        reference = tl.load(saved_ptr + 2 * plane + row)
        log2z = tl.load(saved_ptr + 3 * plane + row)
        x = tl.load(x_ptr + row * stride + o, mask=o < V, other=0.0)
        constant, slope = g * inv_t, 0.0
        if ENT:
            constant, slope = (g + ge * entropy) * inv_t, ge * inv_t * LN2
        if (y // BLOCK == tile) & (y >= 0) & (y < V):
            own = -g * _expm1(logprob)
            if ENT:
                own -= ge * tl.exp2(logprob * LOG2E) * (tl.maximum(logprob, LOWEST, propagate_nan=tl.PropagateNan.ALL) + entropy)
            d = _tile_gradient(x, o, y, own * inv_t, reference, log2z, constant, slope, scale, softcap, ENT, CAP, True)
        else:
            d = _tile_gradient(x, o, y, 0.0, reference, log2z, constant, slope, scale, softcap, ENT, CAP, False)
        tl.store(out, tl.where(o < V, d, 0.0).to(dx_ptr.dtype.element_ty), mask=o < columns)
    else:
        tl.store(out, tl.zeros([BLOCK], dx_ptr.dtype.element_ty), mask=o < columns)


def split_float(value: float) -> tuple[float, float]:
    """A double as two fp32 numbers: Triton passes Python floats as fp32."""
    high = torch.tensor(value, dtype=torch.float32).item()
    return high, value - high


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def forward_config(vocab: int, entropy: bool) -> tuple[int, int, int]:
    """(threads' rows RB, vector K, warps): measured on an H200, see docs/kernels.md."""
    if vocab >= 65536:
        return (256, 8, 8) if entropy else (512, 8, 8)
    return 128, 8, 4


def backward_config(vocab: int) -> tuple[int, int]:
    """(columns a program, warps)."""
    return (2048, 4) if vocab >= 4096 else (1024, 4)


def launch_forward(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    shard: Shard,
    temperature: float,
    softcap: float | None,
    mask_N: torch.Tensor | None,
    entropy: bool,
    partial: bool,
    out: torch.Tensor,
    config: tuple[int, int, int] | None = None,
) -> None:
    """Fill `out`: [4, N] (logprob, entropy, reference, log2z), or with `partial` the [N, 4] statistics of this shard."""
    N = len(targets_N)
    if N == 0:
        return
    rows, vector, warps = config or forward_config(shard.valid, entropy)
    high, low = split_float(1.0 / temperature)
    _forward_kernel[(N,)](
        logits_NV, targets_N, targets_N if mask_N is None else mask_N, out, out.stride(0), logits_NV.stride(0), shard.valid, shard.start,
        1.4426950408889634 / temperature, softcap or 1.0, high, low,
        RB=rows, K=vector, ENT=entropy, CAP=softcap is not None, MASK=mask_N is not None, PARTIAL=partial, num_warps=warps,
    )  # fmt: skip


def merge_and_finish(stats_WN4: torch.Tensor, temperature: float, out: torch.Tensor) -> None:
    """The four outputs [4, N] from the shards' statistics."""
    W, N, _ = stats_WN4.shape
    if N == 0:
        return
    high, low = split_float(1.0 / temperature)
    _merge_kernel[(triton.cdiv(N, 128),)](stats_WN4, out, N, W, 1.4426950408889634 / temperature, high, low, BLOCK=128, num_warps=4)


def launch_backward(
    logits_NV: torch.Tensor,
    out_NV: torch.Tensor,
    targets_N: torch.Tensor,
    saved_4N: torch.Tensor,
    grad_N: torch.Tensor,
    grad_entropy_N: torch.Tensor | None,
    shard: Shard,
    temperature: float,
    softcap: float | None,
    mask_N: torch.Tensor | None = None,
    config: tuple[int, int] | None = None,
) -> None:
    """Write d logits into `out_NV`, which may be `logits_NV`; rows without a gradient are not read."""
    N, columns = logits_NV.shape
    if N == 0:
        return
    block, warps = config or backward_config(columns)
    _backward_kernel[(triton.cdiv(columns, block), N)](
        logits_NV, out_NV, targets_N, saved_4N, grad_N, grad_N if grad_entropy_N is None else grad_entropy_N,
        targets_N if mask_N is None else mask_N, saved_4N.stride(0), logits_NV.stride(0), out_NV.stride(0),
        shard.valid, columns, shard.start,
        1.4426950408889634 / temperature, 1.0 / temperature, softcap or 1.0,
        BLOCK=block, ENT=grad_entropy_N is not None, CAP=softcap is not None, MASK=mask_N is not None, num_warps=warps,
    )  # fmt: skip


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_NV, targets_N, temperature, softcap, mask_N, entropy, inplace, group, shard):
        saved_4N = torch.empty((4, len(targets_N)), dtype=torch.float32, device=logits_NV.device)
        if group is None:
            launch_forward(logits_NV, targets_N, shard, temperature, softcap, mask_N, entropy, False, saved_4N)
        else:
            stats_N4 = torch.empty((len(targets_N), 4), dtype=torch.float32, device=logits_NV.device)
            launch_forward(logits_NV, targets_N, shard, temperature, softcap, mask_N, entropy, True, stats_N4)
            merge_and_finish(gather_stats(stats_N4, group), temperature, saved_4N)
            if mask_N is not None:
                saved_4N.masked_fill_(~mask_N.bool(), 0.0)
        ctx.save_for_backward(logits_NV, targets_N, mask_N, saved_4N)
        ctx.options = (shard, temperature, softcap, inplace)
        return saved_4N[0].clone(), saved_4N[1].clone() if entropy else None

    @staticmethod
    def backward(ctx, grad_N, grad_entropy_N):
        logits_NV, targets_N, mask_N, saved_4N = ctx.saved_tensors
        shard, temperature, softcap, inplace = ctx.options
        out_NV = logits_NV.detach() if inplace else torch.empty_like(logits_NV)
        grad_entropy_N = None if grad_entropy_N is None else grad_entropy_N.contiguous()
        launch_backward(logits_NV, out_NV, targets_N, saved_4N, grad_N.contiguous(), grad_entropy_N, shard, temperature, softcap, mask_N)
        return out_NV, None, None, None, None, None, None, None, None


def triton_token_logprob(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
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
    return _TokenLogprob.apply(logits_NV, targets_N.contiguous(), temperature, softcap, mask_N, entropy, inplace_backward, group, shard)
