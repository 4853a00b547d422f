"""Triton side of kernels/decode_attention.py.

Shape suffixes: T new tokens, N sequences, X tiles, R sequences of a tile, S splits, H query heads, G key heads, D head
dimension.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..decode_cache import CacheLayer, Rows, Shared, Tiles
from ..dispatch import power_of_2

LOG2E = 1.4426950408889634
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _append_kernel(
    x_ptr, q_ptr, k_ptr, v_ptr, base_ptr, table_ptr, qn_ptr, kn_ptr, row_ptr, offset_ptr, pages_ptr, len_ptr, width,
    positions, eps, PAGE: tl.constexpr, GROUPS: tl.constexpr, PER: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    SLOTS: tl.constexpr,
    DP: tl.constexpr, RAGGED: tl.constexpr, NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    row, offset = token, 0
    if RAGGED:
        row = tl.load(row_ptr + token)
        offset = tl.load(offset_ptr + token)
    position = tl.load(len_ptr + row) + offset
    e = tl.arange(0, SLOTS)[:, None]  # the group's queries, then its key, then its value
    d = tl.arange(0, DP)[None, :]
    ok = (e < PER + 2) & (d < D)
    p = x_ptr + ((token * GROUPS + g) * (PER + 2) + e) * D
    x = tl.load(p + d, mask=ok, other=0.0).to(tl.float32)
    turned = d < 2 * HALF
    if INTERLEAVED:
        mate, angle, low = d ^ 1, d // 2, d % 2 == 0
    else:
        low = d < HALF
        mate, angle = tl.where(low, d + HALF, d - HALF), tl.where(low, d, d - HALF)
    y = tl.load(p + mate, mask=ok & turned, other=0.0).to(tl.float32)
    if NORM:
        rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        query = e < PER
        w = tl.where(query, tl.load(qn_ptr + d, mask=d < D, other=0.0), tl.load(kn_ptr + d, mask=d < D, other=0.0)).to(
            tl.float32
        )
        wy = tl.where(
            query, tl.load(qn_ptr + mate, mask=turned, other=0.0), tl.load(kn_ptr + mate, mask=turned, other=0.0)
        ).to(tl.float32)
        # rounded where the separate kernels round
        x = tl.where(e <= PER, (x * rstd * w).to(x_ptr.dtype.element_ty).to(tl.float32), x)
        y = tl.where(e <= PER, (y * rstd * wy).to(x_ptr.dtype.element_ty).to(tl.float32), y)
    inside = (position >= 0) & (position < positions)
    # a position outside the table turns the token into NaN rather than reading past it
    cos = tl.load(table_ptr + position * 2 * HALF + angle, mask=turned & inside, other=float("nan"))
    sin = tl.load(table_ptr + position * 2 * HALF + HALF + angle, mask=turned & inside, other=float("nan"))
    r = tl.where(low, x * cos - y * sin, x * cos + y * sin)
    x = tl.where(turned & (e <= PER), r, x).to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + ((token * GROUPS + g) * PER + e) * D + d, x, mask=ok & (e < PER))
    page = tl.load(pages_ptr + row * width + position // PAGE).to(tl.int64)
    at = ((page * GROUPS + g) * PAGE + position % PAGE) * D
    tl.store(k_ptr + tl.load(base_ptr) + at + d + e * 0, x, mask=ok & (e == PER))
    tl.store(v_ptr + tl.load(base_ptr + 1) + at + d + e * 0, x, mask=ok & (e == PER + 1))


@triton.jit
def _notes_kernel(
    x_ptr, flat_ptr, base_ptr, row_ptr, offset_ptr, pages_ptr, len_ptr, width, PAGE: tl.constexpr, C: tl.constexpr,
    CP: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, offset = token, 0
    if RAGGED:
        row = tl.load(row_ptr + token)
        offset = tl.load(offset_ptr + token)
    position = tl.load(len_ptr + row) + offset
    page = tl.load(pages_ptr + row * width + position // PAGE).to(tl.int64)
    c = tl.arange(0, CP)
    x = tl.load(x_ptr + token * C + c, mask=c < C, other=0)
    tl.store(flat_ptr + tl.load(base_ptr) + (page * PAGE + position % PAGE) * C + c, x, mask=c < C)


@triton.jit
def _pages(table_ptr, low, end, PAGE: tl.constexpr, BN: tl.constexpr):
    """The pages of the keys low .. low + BN: one number where they lie in one page. `low` is a multiple of BN."""
    if PAGE % BN == 0:
        page = tl.load(table_ptr + low // PAGE, mask=low < end, other=0)
    else:
        n = low + tl.arange(0, BN)
        page = tl.load(table_ptr + n // PAGE, mask=n < end, other=0)
    return page.to(tl.int64)


@triton.jit
def _fold(q, k_ptr, v_ptr, at, inner, ok, seen, m, l, acc, scale, PRECISION: tl.constexpr):
    """One block of keys into the running softmax."""
    k = tl.load(k_ptr + at[:, None] + inner, mask=ok, other=0.0)
    x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    x = tl.where(seen, x, LOWEST)
    top = tl.maximum(m, tl.max(x, axis=1))
    p = tl.exp2(x - top[:, None])
    a = tl.exp2(m - top)
    v = tl.load(v_ptr + at[:, None] + inner, mask=ok, other=0.0)
    acc = acc * a[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return top, l * a + tl.sum(p, axis=1), acc


@triton.jit
def _attention_kernel(
    q_ptr, o_ptr, k_ptr, v_ptr, base_ptr, pages_ptr, len_ptr, width, tile_ptr, done_ptr, acc_ptr, ml_ptr, tokens,
    scale, PAGE: tl.constexpr,
    GROUPS: tl.constexpr, PER: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, RAGGED: tl.constexpr, SHARED: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    x = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    HEADS: tl.constexpr = GROUPS * PER
    row, first, offset, count = x, x, 0, 1
    if RAGGED:
        row = tl.load(tile_ptr + x * 4).to(tl.int64)
        first = tl.load(tile_ptr + x * 4 + 1).to(tl.int64)
        offset = tl.load(tile_ptr + x * 4 + 2)
        count = tl.load(tile_ptr + x * 4 + 3)
    start = tl.load(len_ptr + row).to(tl.int32) + offset
    pages_ptr += row * width
    k_ptr += tl.multiple_of(tl.load(base_ptr), 8)
    v_ptr += tl.multiple_of(tl.load(base_ptr + 1), 8)
    i = tl.arange(0, BM)
    token, head = i // PER, g * PER + i % PER
    live = token < count
    d = tl.arange(0, DP)[None, :]
    at_q = ((first + token) * HEADS + head)[:, None]
    q = tl.load(q_ptr + at_q * D + d, mask=live[:, None] & (d < D), other=0.0)
    m = tl.full([BM], LOWEST, tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    begin, end = 0, start + count
    if SHARED:  # what rows read together was read by _prefix_kernel
        begin = tl.load(done_ptr + row).to(tl.int32)
        if begin > 0:
            m = tl.load(ml_ptr + (row * HEADS + head) * 2, mask=live, other=0.0)
            l = tl.load(ml_ptr + (row * HEADS + head) * 2 + 1, mask=live, other=1.0)
            acc = tl.load(acc_ptr + at_q * D + d, mask=live[:, None] & (d < D), other=0.0)
    if SPLITS > 1:
        each = tl.cdiv(tl.cdiv(end, SPLITS), BN) * BN
        begin = tl.program_id(2) * each
        end = tl.minimum(end, begin + each)
    page = _pages(pages_ptr, begin, end, PAGE, BN)
    for low in range(begin, end, BN):
        n = low + tl.arange(0, BN)
        at = ((page * GROUPS + g) * PAGE + n % PAGE) * D
        page = _pages(pages_ptr, low + BN, end, PAGE, BN)  # a step ahead, so that no load of keys waits for it
        ok = (n < end)[:, None] & (d < D)
        seen = (n[None, :] <= (start + token)[:, None]) & (n < end)[None, :]
        m, l, acc = _fold(q, k_ptr, v_ptr, at, d, ok, seen, m, l, acc, scale, PRECISION)
    if SPLITS > 1:
        part = (tl.program_id(2) * tokens + first + token) * HEADS + head
        tl.store(ml_ptr + part * 2, m, mask=live)
        tl.store(ml_ptr + part * 2 + 1, l, mask=live)
        tl.store(acc_ptr + part[:, None] * D + d, acc, mask=live[:, None] & (d < D))
    else:
        tl.store(o_ptr + at_q * D + d, (acc / l[:, None]).to(o_ptr.dtype.element_ty), mask=live[:, None] & (d < D))


@triton.jit
def _prefix_kernel(
    q_ptr, k_ptr, v_ptr, base_ptr, pages_ptr, width, rows_ptr, done_ptr, acc_ptr, ml_ptr, scale, PAGE: tl.constexpr,
    GROUPS: tl.constexpr,
    PER: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    x = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    first = tl.load(rows_ptr + x * R).to(tl.int64)
    if first >= 0:
        i = tl.arange(0, BM)
        row = tl.load(rows_ptr + x * R + i // PER, mask=i // PER < R, other=-1).to(tl.int64)
        live = row >= 0
        at_q = row * (GROUPS * PER) + g * PER + i % PER
        d = tl.arange(0, DP)[None, :]
        q = tl.load(q_ptr + at_q[:, None] * D + d, mask=live[:, None] & (d < D), other=0.0)
        pages_ptr += first * width
        k_ptr += tl.multiple_of(tl.load(base_ptr), 8)
        v_ptr += tl.multiple_of(tl.load(base_ptr + 1), 8)
        m = tl.full([BM], LOWEST, tl.float32)
        l = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, DP], tl.float32)
        done = tl.load(done_ptr + first).to(tl.int32)
        page = _pages(pages_ptr, 0, done, PAGE, BN)
        for low in range(0, done, BN):
            n = low + tl.arange(0, BN)
            at = ((page * GROUPS + g) * PAGE + n % PAGE) * D
            page = _pages(pages_ptr, low + BN, done, PAGE, BN)
            m, l, acc = _fold(
                q, k_ptr, v_ptr, at, d, (n < done)[:, None] & (d < D), (n < done)[None, :], m, l, acc, scale, PRECISION
            )
        tl.store(ml_ptr + at_q * 2, m, mask=live)
        tl.store(ml_ptr + at_q * 2 + 1, l, mask=live)
        tl.store(acc_ptr + at_q[:, None] * D + d, acc, mask=live[:, None] & (d < D))


@triton.jit
def _merge_kernel(
    acc_ptr, ml_ptr, o_ptr, rows, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SP)
    d = tl.arange(0, DP)
    part = s * rows + at
    m = tl.load(ml_ptr + part * 2, mask=s < SPLITS, other=LOWEST)
    l = tl.load(ml_ptr + part * 2 + 1, mask=s < SPLITS, other=0.0)
    w = tl.exp2(m - tl.max(m, axis=0))
    acc = tl.load(acc_ptr + part[:, None] * D + d[None, :], mask=(s < SPLITS)[:, None] & (d < D)[None, :], other=0.0)
    o = tl.sum(acc * w[:, None], axis=0) / tl.sum(l * w, axis=0)
    tl.store(o_ptr + at * D + d, o.to(o_ptr.dtype.element_ty), mask=d < D)


def row_shape(rows: int, dim: int, wide: bool) -> dict[str, int]:
    """Keys a step of the loop, warps and stages, measured on an H200; fp32, which has no matrix unit, needs more
    threads.
    """
    if rows > 16:
        return {"BN": 64, "num_warps": 4, "num_stages": 2}
    return {"BN": 32, "num_warps": 4 if wide else 1 if dim <= 64 else 2, "num_stages": 3}


def _padded(dim: int) -> int:
    return max(16, power_of_2(dim))


def triton_append(
    qkv_TGED: torch.Tensor,
    cache: CacheLayer,
    rows: Rows,
    table_PC: torch.Tensor,
    tiles: Tiles | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    interleaved: bool,
) -> torch.Tensor:
    """See `append_kv`."""
    tokens, groups, slots, dim = qkv_TGED.shape
    per = slots - 2
    q_THD = torch.empty((tokens, groups * per, dim), dtype=qkv_TGED.dtype, device=qkv_TGED.device)
    ragged = tiles is not None
    q_norm, k_norm = norms if norms is not None else (qkv_TGED, qkv_TGED)
    if tokens:
        _append_kernel[(tokens, groups)](
            qkv_TGED, q_THD, cache.k, cache.v, cache.base_2, table_PC, q_norm, k_norm,
            tiles.row_T if ragged else rows.len_N, tiles.offset_T if ragged else rows.len_N,
            rows.table_NP, rows.len_N, rows.table_NP.stride(0), table_PC.shape[0], eps, PAGE=rows.page,
            GROUPS=groups, PER=per, D=dim, HALF=table_PC.shape[1] // 2, SLOTS=power_of_2(slots),
            DP=_padded(dim), RAGGED=ragged, NORM=norms is not None, INTERLEAVED=interleaved,
            num_warps=2 if per > 1 else 1,
        )  # fmt: skip
    return q_THD


def triton_append_notes(
    x_TC: torch.Tensor, flat: torch.Tensor, base_1: torch.Tensor, rows: Rows, tiles: Tiles | None
) -> None:
    """See `append_notes`."""
    ragged = tiles is not None
    if len(x_TC):
        _notes_kernel[(len(x_TC),)](
            x_TC.contiguous(), flat, base_1, tiles.row_T if ragged else rows.len_N,
            tiles.offset_T if ragged else rows.len_N, rows.table_NP, rows.len_N, rows.table_NP.stride(0),
            PAGE=rows.page, C=x_TC.shape[1], CP=power_of_2(x_TC.shape[1]), RAGGED=ragged, num_warps=1,
        )  # fmt: skip


def triton_attention(
    q_THD: torch.Tensor,
    cache: CacheLayer,
    rows: Rows,
    groups: int,
    scale: float,
    tiles: Tiles | None,
    shared: Shared | None,
    splits: int,
) -> torch.Tensor:
    """See `cached_attention`."""
    tokens, heads, dim = q_THD.shape
    per, o_THD, ragged = heads // groups, torch.empty_like(q_THD), tiles is not None
    if not tokens:
        return o_THD
    if shared is not None and (ragged or splits > 1):
        raise ValueError("shared pages are for one token a sequence, and exclude split keys")
    parts = (splits, tokens, heads) if splits > 1 else (tokens, heads) if shared is not None else (1,)
    acc = torch.empty((*parts, dim), dtype=torch.float32, device=q_THD.device)
    ml = torch.empty((*parts, 2), dtype=torch.float32, device=q_THD.device)
    common = {"PAGE": rows.page, "GROUPS": groups, "PER": per, "D": dim, "DP": _padded(dim)}
    common["PRECISION"] = "ieee" if q_THD.dtype == torch.float32 else "tf32"
    if shared is not None:
        tiles_x, together = shared.rows_XR.shape
        wide = max(16, power_of_2(together * per))
        _prefix_kernel[(tiles_x, groups)](
            q_THD, cache.k, cache.v, cache.base_2, rows.table_NP, rows.table_NP.stride(0), shared.rows_XR,
            shared.done_N, acc, ml,
            scale * LOG2E, BM=wide, R=together, BN=64, num_warps=4, num_stages=2, **common,
        )  # fmt: skip
    programs, most = (len(tiles.tile_X4), tiles.most) if ragged else (tokens, 1)
    wide = max(16, power_of_2(most * per))
    shape = row_shape(wide, dim, q_THD.dtype == torch.float32)
    _attention_kernel[(programs, groups, splits)](
        q_THD, o_THD, cache.k, cache.v, cache.base_2, rows.table_NP, rows.len_N, rows.table_NP.stride(0),
        tiles.tile_X4 if ragged else rows.len_N, shared.done_N if shared is not None else rows.len_N, acc, ml,
        tokens, scale * LOG2E, BM=wide, RAGGED=ragged, SHARED=shared is not None, SPLITS=splits, **shape, **common,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(tokens * heads,)](
            acc, ml, o_THD, tokens * heads, D=dim, DP=_padded(dim), SPLITS=splits, SP=power_of_2(splits), num_warps=1
        )
    return o_THD
