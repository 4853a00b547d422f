"""Triton side of the per-token policy loss: loss, report sums and the gradient of every token in one pass.

Shape suffixes: N rows (tokens), P programs, S report sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import cdiv
from ..policy import MAX_LOG_RATIO, SUM_NAMES, PolicySettings, PolicyTerms
from .logprob import LOG2E, multiprocessors

MAX_LR = tl.constexpr(MAX_LOG_RATIO)
SUMS = tl.constexpr(len(SUM_NAMES))
KL_KINDS = {"k1": 1, "k2": 2, "k3": 3}


@triton.jit
def _exp_gap(x):
    """(exp(x) - 1 - x, exp(x) - 1) with a series near zero, where the differences would cancel."""
    series = 1.0 / 40320.0
    series = series * x + 1.0 / 5040.0
    series = series * x + 1.0 / 720.0
    series = series * x + 1.0 / 120.0
    series = series * x + 1.0 / 24.0
    series = series * x + 1.0 / 6.0
    series = series * x + 0.5
    e1 = tl.exp2(tl.minimum(x, 80.0, propagate_nan=tl.PropagateNan.ALL) * LOG2E) - 1.0
    near = tl.abs(x) < 0.5
    return tl.where(near, series * x * x, e1 - x), tl.where(near, series * x * x + x, e1)


@triton.jit
def policy_token(
    lp, ce, pg, klw, adv, old, ref, low, high, dual, kl_clamp,
    CE: tl.constexpr, PG: tl.constexpr, KL: tl.constexpr, OLD: tl.constexpr, DUAL: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """d loss / d logprob of tokens and the quantities that the report sums; KL is 0 (none) or 1, 2, 3."""
    zero = lp * 0.0
    zero = tl.where(zero == 0.0, zero, 0.0)
    d, ce_loss, pg_loss, kl_loss, kl, approx, ratio, is_low, is_high, is_dual, clamped = (
        zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero,
    )  # fmt: skip
    if CE:
        ce_loss = tl.where(ce != 0.0, -ce * lp, 0.0)
        d -= ce
    if PG:
        on = pg != 0.0
        was = lp
        if OLD:
            was = old
        lr = tl.where(on, lp - was, 0.0)
        outside = tl.abs(lr) > MAX_LR
        near = tl.where(outside, tl.where(lr > 0, MAX_LR, -MAX_LR), lr)
        r = tl.exp2(near * LOG2E)
        bound = tl.minimum(tl.maximum(r, low), high)
        plain = -adv * r
        clipped = -adv * bound
        active = clipped > plain
        value = tl.where(active, clipped, plain)
        if DUAL:
            cap = -adv * dual
            over = (adv < 0.0) & (value > cap)
            value = tl.where(over, cap, value)
            is_dual = tl.where(over & on, 1.0, 0.0)
            stopped = active | over | outside
        else:
            stopped = active | outside
        pg_loss = tl.where(on, pg * value, 0.0)
        d += tl.where(on & (stopped == 0), pg * plain, 0.0)
        approx = tl.where(on, -lr, 0.0)
        ratio = tl.where(on, r, 0.0)
        is_low = tl.where(on & active & (adv < 0.0), 1.0, 0.0)
        is_high = tl.where(on & active & (adv > 0.0), 1.0, 0.0)
        clamped = tl.where(on & outside, 1.0, 0.0)
    if KL > 0:
        on_kl = klw != 0.0
        gap = tl.where(on_kl, ref - lp, 0.0)
        if KL == 1:
            value_kl, slope = -gap, zero + 1.0
        elif KL == 2:
            value_kl, slope = 0.5 * gap * gap, -gap
        else:
            value_kl, e1 = _exp_gap(gap)
            slope = -e1
        if CLAMP:
            slope = tl.where(tl.abs(value_kl) > kl_clamp, 0.0, slope)
            value_kl = tl.where(tl.abs(value_kl) > kl_clamp, tl.where(value_kl > 0, kl_clamp, -kl_clamp), value_kl)
        kl = value_kl
        kl_loss = tl.where(on_kl, klw * value_kl, 0.0)
        d += tl.where(on_kl, klw * slope, 0.0)
    return d, ce_loss, pg_loss, kl_loss, kl, approx, ratio, is_low, is_high, is_dual, clamped


@triton.jit
def _get(ptr, o, ok, HAS: tl.constexpr):
    if HAS:
        return tl.load(ptr + o, mask=ok, other=0.0)
    else:
        return tl.zeros(o.shape, tl.float32)


@triton.jit
def _terms_kernel(
    lp_ptr, ent_ptr, ce_ptr, pg_ptr, klw_ptr, entw_ptr, adv_ptr, old_ptr, ref_ptr, d_ptr, part_ptr, N,
    low, high, dual, kl_clamp,
    RB: tl.constexpr, K: tl.constexpr, CE: tl.constexpr, PG: tl.constexpr, KL: tl.constexpr, ENT: tl.constexpr,
    ENTW: tl.constexpr,
    OLD: tl.constexpr, DUAL: tl.constexpr, CLAMP: tl.constexpr, GRAD: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    offs = tl.arange(0, RB)[:, None] * K + tl.arange(0, K)[None, :]
    zero = tl.zeros([RB], tl.float32)
    # in the order of SUM_NAMES
    sum_pg_loss, sum_ce_loss, sum_kl_loss, sum_entropy_loss = zero, zero, zero, zero
    sum_tokens, sum_pg_tokens, sum_logprob, sum_entropy = zero, zero, zero, zero
    sum_kl, sum_approx_kl, sum_ratio, sum_ratio_sq = zero, zero, zero, zero
    sum_clipped_low, sum_clipped_high, sum_dual_clipped, sum_ratio_clamped = zero, zero, zero, zero
    for tile in range(pid, tl.cdiv(N, RB * K), programs):
        o = tile * (RB * K) + offs
        ok = o < N
        lp = tl.load(lp_ptr + o, mask=ok, other=0.0)
        ent = _get(ent_ptr, o, ok, ENT)
        ce, pg, klw, entw = (
            _get(ce_ptr, o, ok, CE),
            _get(pg_ptr, o, ok, PG),
            _get(klw_ptr, o, ok, KL > 0),
            _get(entw_ptr, o, ok, ENTW),
        )
        adv, old, ref = _get(adv_ptr, o, ok, PG), _get(old_ptr, o, ok, OLD), _get(ref_ptr, o, ok, KL > 0)
        d, ce_loss, pg_loss, kl_loss, kl, approx, ratio, is_low, is_high, is_dual, clamped = policy_token(
            lp, ce, pg, klw, adv, old, ref, low, high, dual, kl_clamp, CE, PG, KL, OLD, DUAL, CLAMP
        )
        if GRAD:
            tl.store(d_ptr + o, d, mask=ok)
        live = (ce != 0.0) | (pg != 0.0) | (klw != 0.0) | (entw != 0.0)
        sum_tokens += tl.sum(live.to(tl.float32), axis=1)
        sum_logprob += tl.sum(tl.where(live, lp, 0.0), axis=1)
        if CE:
            sum_ce_loss += tl.sum(ce_loss, axis=1)
        if PG:
            sum_pg_loss += tl.sum(pg_loss, axis=1)
            sum_pg_tokens += tl.sum((pg != 0.0).to(tl.float32), axis=1)
            sum_approx_kl += tl.sum(approx, axis=1)
            sum_ratio += tl.sum(ratio, axis=1)
            sum_ratio_sq += tl.sum(ratio * ratio, axis=1)
            sum_clipped_low += tl.sum(is_low, axis=1)
            sum_clipped_high += tl.sum(is_high, axis=1)
            sum_ratio_clamped += tl.sum(clamped, axis=1)
            if DUAL:
                sum_dual_clipped += tl.sum(is_dual, axis=1)
        if KL > 0:
            sum_kl_loss += tl.sum(kl_loss, axis=1)
            sum_kl += tl.sum(kl, axis=1)
        if ENT:
            sum_entropy += tl.sum(tl.where(live, ent, 0.0), axis=1)
        if ENTW:
            sum_entropy_loss += tl.sum(tl.where(entw != 0.0, -entw * ent, 0.0), axis=1)
    p = part_ptr + pid * SUMS
    tl.store(p, tl.sum(sum_pg_loss, axis=0))
    tl.store(p + 1, tl.sum(sum_ce_loss, axis=0))
    tl.store(p + 2, tl.sum(sum_kl_loss, axis=0))
    tl.store(p + 3, tl.sum(sum_entropy_loss, axis=0))
    tl.store(p + 4, tl.sum(sum_tokens, axis=0))
    tl.store(p + 5, tl.sum(sum_pg_tokens, axis=0))
    tl.store(p + 6, tl.sum(sum_logprob, axis=0))
    tl.store(p + 7, tl.sum(sum_entropy, axis=0))
    tl.store(p + 8, tl.sum(sum_kl, axis=0))
    tl.store(p + 9, tl.sum(sum_approx_kl, axis=0))
    tl.store(p + 10, tl.sum(sum_ratio, axis=0))
    tl.store(p + 11, tl.sum(sum_ratio_sq, axis=0))
    tl.store(p + 12, tl.sum(sum_clipped_low, axis=0))
    tl.store(p + 13, tl.sum(sum_clipped_high, axis=0))
    tl.store(p + 14, tl.sum(sum_dual_clipped, axis=0))
    tl.store(p + 15, tl.sum(sum_ratio_clamped, axis=0))


@triton.jit
def _sums_kernel(part_ptr, out_ptr, P, BLOCK: tl.constexpr):
    """Sum the programs' partial sums in a fixed order; the first four are the loss."""
    c = tl.arange(0, 16)
    total = tl.zeros([16], tl.float32)
    for start in range(0, P, BLOCK):
        r = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(part_ptr + r[:, None] * 16 + c[None, :], mask=r[:, None] < P, other=0.0), axis=0)
    tl.store(out_ptr + c, total)
    tl.store(out_ptr + 16, tl.sum(tl.where(c < 4, total, 0.0), axis=0))


def kernel_flags(terms: PolicyTerms, settings: PolicySettings) -> dict:
    """The compile-time switches of `policy_token`."""
    return {
        "CE": terms.ce_weight is not None,
        "PG": terms.pg_weight is not None,
        "KL": KL_KINDS[settings.kl] if terms.kl_weight is not None else 0,
        "OLD": terms.old_logprob is not None,
        "DUAL": settings.dual_clip is not None,
        "CLAMP": settings.kl_clamp is not None,
    }


def kernel_scalars(settings: PolicySettings) -> tuple[float, float, float, float]:
    """The numbers of `policy_token`: clip bounds, dual clip, KL clamp."""
    return 1.0 - settings.clip_low, 1.0 + settings.clip_high, settings.dual_clip or 0.0, settings.kl_clamp or 0.0


def kernel_tensors(terms: PolicyTerms, like: torch.Tensor) -> list[torch.Tensor]:
    """ce, pg, kl, entropy weight, advantage, old, ref; `like` stands in for those not used."""
    names = ("ce_weight", "pg_weight", "kl_weight", "entropy_weight", "advantage", "old_logprob", "ref_logprob")
    return [like if (v := getattr(terms, name)) is None else v.float().contiguous() for name in names]


def launch_terms(
    logprob_N: torch.Tensor,
    entropy_N: torch.Tensor | None,
    terms: PolicyTerms,
    settings: PolicySettings,
    grad_N: torch.Tensor | None,
    config: tuple[int, int, int, int] = (256, 4, 8, 4),
) -> torch.Tensor:
    """Report sums and, last, the loss; fills `grad_N` with d loss / d logprob when given."""
    N = len(logprob_N)
    rows, vector, warps, per_sm = config
    tiles = cdiv(N, rows * vector)
    programs = max(1, min(tiles, multiprocessors(logprob_N.device) * per_sm))
    part = torch.empty((programs, len(SUM_NAMES)), dtype=torch.float32, device=logprob_N.device)
    out = torch.empty(len(SUM_NAMES) + 1, dtype=torch.float32, device=logprob_N.device)
    _terms_kernel[(programs,)](
        logprob_N, logprob_N if entropy_N is None else entropy_N, *kernel_tensors(terms, logprob_N),
        logprob_N if grad_N is None else grad_N, part, N, *kernel_scalars(settings),
        RB=rows, K=vector, ENT=entropy_N is not None, ENTW=terms.entropy_weight is not None and entropy_N is not None,
        GRAD=grad_N is not None, num_warps=warps, **kernel_flags(terms, settings),
    )  # fmt: skip
    _sums_kernel[(1,)](part, out, programs, BLOCK=64, num_warps=4)
    return out


def named_sums(values: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(zip(SUM_NAMES, values[: len(SUM_NAMES)].unbind(), strict=True))
