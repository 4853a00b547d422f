"""Log-probability and entropy of chosen tokens from logits.

Shape suffixes: N rows (tokens), V vocabulary (this rank's shard), W ranks, 4 the statistics of one row.

The law here is a form without cancellation. With x_t the target's logit, M the largest *other* logit and R the sum of
exp(x_j - M) over the others less one: for x_t >= M, logp = -log1p((1 + R) exp(M - x_t)); else logp = -(M - x_t) -
log1p(R + exp(x_t - M)). The usual logsumexp form loses every digit of a confident token, which is most tokens of a
trained policy.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .dispatch import use_triton
from .vocab import Shard, gather_stats, vocab_shard

LOWEST = -1.0e30  # stands for "no other logit": finite, so that differences stay numbers


def check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")


def check_targets(targets_N: torch.Tensor, mask_N: torch.Tensor | None, vocab: int) -> None:
    """Out-of-range ids raise on CPU; on CUDA (no sync) the kernels answer NaN for such a row."""
    if targets_N.is_cuda:
        return
    bad = (targets_N < 0) | (targets_N >= vocab)
    if mask_N is not None:
        bad = bad & mask_N.bool()
    if bool(bad.any()):
        raise ValueError(
            f"target id {int(targets_N[bad][0])} is outside the vocabulary of {vocab}; mask such rows or fix the "
            "targets"
        )


def _row_stats(
    x_NV: torch.Tensor, targets_N: torch.Tensor, shard: Shard, temperature: float, entropy: bool
) -> torch.Tensor:
    """(M, R, S, x_t) per row over this shard; S is the sum of exp(g) g over the others' gaps g, x_t is -inf where not
    owned.

    M and x_t are logits before the temperature: dividing the gaps, not the logits, keeps the digits of large logits.
    """
    local_N = targets_N - shard.start
    owned_N = (local_N >= 0) & (local_N < shard.valid)
    column_N1 = local_N.clamp(0, max(shard.valid - 1, 0))[:, None]
    target_N = torch.where(owned_N, x_NV.gather(1, column_N1)[:, 0], torch.full_like(x_NV[:, 0], -torch.inf))
    hidden_N1 = torch.where(owned_N[:, None], torch.full_like(x_NV[:, :1], -torch.inf), x_NV.gather(1, column_N1))
    others_NV = x_NV.scatter(1, column_N1, hidden_N1)
    if shard.valid < x_NV.shape[1]:
        others_NV = others_NV.index_fill(1, torch.arange(shard.valid, x_NV.shape[1], device=x_NV.device), -torch.inf)
    top_N, where_N = others_NV.detach().max(dim=1)
    top_N = torch.where(top_N == -torch.inf, torch.full_like(top_N, LOWEST), top_N)
    gap_NV = others_NV - top_N[:, None]
    if temperature != 1.0:
        gap_NV = gap_NV / temperature
    weight_NV = gap_NV.exp()
    # The top's own 1 is left out of the sum (and its gap, 0, kept for the gradient): R keeps its digits when it is
    # tiny.
    top_weight_N = weight_NV.gather(1, where_N[:, None])[:, 0]
    rest_NV = weight_NV.scatter(1, where_N[:, None], 0.0)
    r_N = rest_NV.sum(dim=1) + (top_weight_N - 1.0)
    if entropy:
        s_N = (weight_NV * torch.where(gap_NV == -torch.inf, torch.zeros_like(gap_NV), gap_NV)).sum(dim=1)
    else:
        s_N = torch.zeros_like(r_N)
    return torch.stack([top_N, r_N, s_N, target_N], dim=1)


def merge_stats(stats_WN4: torch.Tensor, temperature: float) -> torch.Tensor:
    """One row of statistics from the shards', summed in rank order so that every rank gets the same bits."""
    top_WN, r_WN, s_WN, target_WN = stats_WN4.unbind(-1)
    target_N = target_WN.amax(dim=0)  # -inf on every rank but the owner
    target_N = torch.where(target_WN.isnan().any(dim=0), torch.full_like(target_N, torch.nan), target_N)
    top_N, winner_N = top_WN.max(dim=0)
    r_N, s_N = torch.zeros_like(top_N), torch.zeros_like(top_N)
    for rank in range(stats_WN4.shape[0]):
        gap_N = (top_WN[rank] - top_N) / temperature
        scale_N = torch.exp(gap_N)
        own = winner_N == rank
        mass_N = 1.0 + r_WN[rank]
        r_N = r_N + torch.where(own, r_WN[rank], mass_N * scale_N)
        s_N = s_N + torch.where(own, s_WN[rank], scale_N * (s_WN[rank] + mass_N * gap_N))
    return torch.stack([top_N, r_N, s_N, target_N], dim=1)


def finish_stats(
    stats_N4: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logprob, entropy, reference logit, log of the normaliser relative to it) of each row, in fp64: rows are few
    numbers.
    """
    top_N, r_N, s_N, target_N = stats_N4.double().unbind(1)
    gap_N = (top_N - target_N) / temperature
    confident_N = gap_N <= 0
    # Both branches are evaluated; the argument of exp is kept non-positive in the one not taken so that its gradient is
    # finite.
    down_N = torch.where(confident_N, gap_N, -gap_N)
    e_N = down_N.exp()
    mass_N = 1.0 + r_N
    excess_N = torch.where(confident_N, mass_N * e_N, r_N + e_N)  # normaliser less one
    log_N = torch.log1p(excess_N)
    logprob_N = torch.where(confident_N, -log_N, -gap_N - log_N)
    finite_down_N = torch.where(e_N == 0, torch.zeros_like(down_N), down_N)
    s_all_N = torch.where(confident_N, e_N * (s_N + mass_N * finite_down_N), s_N + e_N * finite_down_N)
    entropy_N = log_N - s_all_N / (1.0 + excess_N)
    # Every logit -inf, or one of +inf: there is no distribution.
    empty_N = ((target_N == -torch.inf) & (mass_N == 0)) | (target_N == torch.inf)
    logprob_N = torch.where(empty_N, torch.full_like(logprob_N, torch.nan), logprob_N)
    entropy_N = torch.where(empty_N, torch.full_like(entropy_N, torch.nan), entropy_N)
    return logprob_N, entropy_N, torch.maximum(top_N, target_N), log_N


class _VocabParallel(torch.autograd.Function):
    """Log-prob and entropy over vocabulary shards: one all-gather of four numbers a token forward, nothing backward."""

    @staticmethod
    def forward(ctx, x_NV, targets_N, shard, temperature, group):
        stats_N4 = _row_stats(x_NV, targets_N, shard, temperature, entropy=True).contiguous()
        stats_N4 = merge_stats(gather_stats(stats_N4, group), temperature)
        logprob_N, entropy_N, reference_N, log_N = (v.to(x_NV.dtype) for v in finish_stats(stats_N4, temperature))
        ctx.save_for_backward(x_NV, targets_N, logprob_N, entropy_N, reference_N, log_N)
        ctx.shard, ctx.temperature = shard, temperature
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx, grad_logprob_N, grad_entropy_N):
        x_NV, targets_N, logprob_N, entropy_N, reference_N, log_N = ctx.saved_tensors
        logp_NV = (x_NV - reference_N[:, None]) / ctx.temperature - log_N[:, None]
        p_NV = logp_NV.exp()
        logp_NV = torch.where(p_NV == 0, torch.zeros_like(logp_NV), logp_NV)
        grad_NV = -p_NV * (grad_logprob_N[:, None] + grad_entropy_N[:, None] * (logp_NV + entropy_N[:, None]))
        grad_NV[:, ctx.shard.valid :] = 0.0
        local_N = targets_N - ctx.shard.start
        row = torch.nonzero((local_N >= 0) & (local_N < ctx.shard.valid))[:, 0]
        column = local_N[row]
        own = -torch.expm1(logprob_N[row]) * grad_logprob_N[row]
        own = own - grad_entropy_N[row] * logprob_N[row].exp() * (logprob_N[row].clamp_min(LOWEST) + entropy_N[row])
        grad_NV[row, column] = own
        return grad_NV / ctx.temperature, None, None, None, None


def reference_token_logprob(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    mask_N: torch.Tensor | None = None,
    entropy: bool = False,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Plain torch, differentiable through autograd; fp64 logits stay fp64 (the oracle of the kernels)."""
    total, shard = len(targets_N), vocab_shard(logits_NV.shape[1], group, vocab_size)
    rows = None if mask_N is None else torch.nonzero(mask_N)[:, 0]
    if rows is not None and len(rows) == total:
        rows = None
    if rows is not None:
        logits_NV, targets_N = logits_NV.index_select(0, rows), targets_N.index_select(0, rows)
    x_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    if group is None:
        values = finish_stats(_row_stats(x_NV, targets_N, shard, temperature, entropy), temperature)
        logprob_N, entropy_N = values[0].to(x_NV.dtype), values[1].to(x_NV.dtype)
    else:
        logprob_N, entropy_N = _VocabParallel.apply(x_NV, targets_N, shard, temperature, group)
    if rows is not None:
        logprob_N = logprob_N.new_zeros(total).index_copy(0, rows, logprob_N)
        entropy_N = entropy_N.new_zeros(total).index_copy(0, rows, entropy_N)
    return logprob_N, entropy_N if entropy else None


def token_logprob(
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
    """Log-probability (and entropy) of each row's target in fp32, with gradients through both.

    Rows where `mask_N` is false are not read; their outputs and gradients are 0. `inplace_backward` lets the gradient
    overwrite the logits on CUDA. With `group`, `logits_NV` is this rank's shard of the vocabulary.
    """
    check_temperature(temperature)
    world = 1 if group is None else dist.get_world_size(group)
    check_targets(targets_N, mask_N, vocab_size or logits_NV.shape[1] * world)
    if use_triton(logits_NV):
        from .triton.logprob import triton_token_logprob

        return triton_token_logprob(
            logits_NV,
            targets_N,
            temperature=temperature,
            mask_N=mask_N,
            entropy=entropy,
            inplace_backward=inplace_backward,
            group=group,
            vocab_size=vocab_size,
        )
    return reference_token_logprob(
        logits_NV,
        targets_N,
        temperature=temperature,
        mask_N=mask_N,
        entropy=entropy,
        group=group,
        vocab_size=vocab_size,
    )
