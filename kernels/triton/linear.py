"""Head matmul and log-prob kernels together, in row chunks: cuBLAS makes the logits, one kernel makes statistics or
gradients of them.

Shape suffixes: N rows (tokens), R rows of a chunk, C columns of a range or chosen rows, H hidden, V vocabulary (this
rank's shard).

Scoring costs one matmul. `triton_policy_loss` makes the gradients in the forward: the chunk of logits becomes its own
gradient in place, then two more matmuls use it, so nothing is recomputed. `triton_linear_logprob` recomputes logits in
its backward. With the head's copy in fp8 logits are cuBLAS's products of rows cast to fp8; gradients never are.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.distributed as dist

from ..batch_invariant import is_batch_invariant
from ..dispatch import cdiv
from ..fp8 import Scaled, cast_rows, scaled_product
from ..policy import Documents, PolicyOutput, PolicySettings, PolicyTerms, reference_policy_terms
from ..vocab import Shard, gather_stats, vocab_shard
from .logprob import finish_rows, launch_backward, launch_stats, merge_shards, score_logits
from .policy import launch_terms, named_sums

SCORE_BYTES = 640 << 20  # logits held at a time when scoring
# logits held at a time when making gradients: fewer, larger chunks re-read the fp32 sums less often
GRAD_BYTES = 1280 << 20

ROW_TILE = 128  # chunks are whole matmul tiles
COLUMN_TILE = 256


def even_parts(total: int, most: int, tile: int) -> list[slice]:
    """Slices of whole tiles, at most `most` long (one tile at least), and even, so that the last is no sliver."""
    most = max(tile, most // tile * tile)
    size = cdiv(cdiv(total, max(1, cdiv(total, most))), tile) * tile
    return [slice(start, min(start + size, total)) for start in range(0, total, max(size, 1))]


def row_parts(rows: int, columns: int, itemsize: int, limit: int) -> list[slice]:
    return even_parts(rows, limit // (columns * itemsize), ROW_TILE)


def column_parts(rows: int, columns: int, itemsize: int, limit: int) -> list[slice]:
    return even_parts(columns, limit // (max(rows, 1) * itemsize), COLUMN_TILE)


def longest(parts: list[slice]) -> int:
    return max((p.stop - p.start for p in parts), default=1)


def add_matmul(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, fresh: bool) -> None:
    """total (+)= left @ right in fp32, never rounding a chunk's product to bf16 (`fresh` overwrites)."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        if fresh:
            torch.mm(left, right, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    elif fresh:
        torch.mm(left.float(), right.float(), out=total)
    else:
        total.addmm_(left.float(), right.float())


def check_dtypes(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> None:
    if hidden_NH.dtype != weight_VH.dtype:
        raise ValueError(
            f"hidden states are {hidden_NH.dtype} and the head's weight {weight_VH.dtype}: cast one of them"
        )


class _LinearLogprob(torch.autograd.Function):
    """Works in ranges of columns: each one's weight gradient is then a single product, and the small hidden gradient
    what is summed.

    The forward leaves the logits of its last range to the backward, which needs that much memory anyway and recomputes
    the others.
    """

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, targets_N, temperature, entropy, group, shard, gradient, fp8):
        score = (hidden_NH, weight_VH, targets_N, temperature, entropy, group, shard)
        ctx.kept = None
        if is_batch_invariant():
            saved_4N = score_whole_rows(*score)
        elif gradient:
            saved_4N, ctx.kept = score_columns(*score, GRAD_BYTES, keep=True)
        else:
            saved_4N, _ = score_columns(*score, SCORE_BYTES, fp8=fp8)
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, saved_4N)
        ctx.options = (temperature, group, shard)
        return saved_4N[0], saved_4N[1] if entropy else None

    @staticmethod
    def backward(ctx, grad_N, grad_entropy_N):
        hidden_NH, weight_VH, targets_N, saved_4N = ctx.saved_tensors
        temperature, group, shard = ctx.options
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_N = grad_N.contiguous()
        grad_entropy_N = None if grad_entropy_N is None else grad_entropy_N.contiguous()
        parts = column_parts(len(targets_N), len(weight_VH), hidden_NH.element_size(), GRAD_BYTES)
        buffer, ctx.kept = ctx.kept, None  # overwritten here: a second backward recomputes them all
        kept = buffer is not None
        if buffer is None:
            buffer = hidden_NH.new_empty(len(targets_N) * longest(parts))
        one = len(parts) == 1
        dhidden_NH = torch.empty_like(hidden_NH, dtype=None if one else torch.float32) if need_hidden else None
        dweight_VH = torch.empty_like(weight_VH) if need_weight else None
        for i, part in enumerate(reversed(parts)):
            logits_NC = part_logits(hidden_NH, weight_VH, part, buffer, made=kept and i == 0)
            where = part_shard(shard, part)
            launch_backward(logits_NC, logits_NC, targets_N, saved_4N, grad_N, grad_entropy_N, where, temperature)
            if dhidden_NH is not None and one:
                torch.mm(logits_NC, weight_VH, out=dhidden_NH)
            elif dhidden_NH is not None:
                add_matmul(dhidden_NH, logits_NC, weight_VH[part], fresh=i == 0)
            if dweight_VH is not None:
                torch.mm(logits_NC.T, hidden_NH, out=dweight_VH[part])
        if dhidden_NH is not None:
            dhidden_NH = dhidden_NH.to(hidden_NH.dtype)
            if group is not None:
                dist.all_reduce(dhidden_NH, group=group)
        return dhidden_NH, dweight_VH, None, None, None, None, None, None, None


@cache
def second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def part_shard(shard: Shard, part: slice) -> Shard:
    """A range of this rank's columns as a shard of its own."""
    return Shard(shard.start + part.start, max(0, min(part.stop, shard.valid) - part.start), shard.vocab)


def part_logits(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    part: slice,
    buffer: torch.Tensor,
    made: bool = False,
    fp8: tuple[Scaled, Scaled] | None = None,
) -> torch.Tensor:
    """The logits of a range of columns, packed in the flat `buffer` (where they are when `made`); `fp8` are both
    factors in that form.
    """
    rows, columns = len(hidden_NH), part.stop - part.start
    out_NC = buffer[: rows * columns].view(rows, columns)
    if made:
        return out_NC
    if fp8 is not None:
        return scaled_product(fp8[0], fp8[1].part(part), out_NC.dtype, fast=True, out=out_NC)
    return torch.mm(hidden_NH, weight_VH[part].T, out=out_NC)


def score_columns(
    hidden_NH, weight_VH, targets_N, temperature, entropy, group, shard, limit, keep=False, fp8=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[4, N]: log-prob, entropy, reference logit and log2 normaliser of every row; and, to `keep`, the last range's
    logits.

    One matmul, in ranges of columns, so that the weight, which is larger than the hidden states, is read once. There
    are two buffers: the statistics of one range are made on a second stream while the next range is multiplied, which
    fills the gaps between kernels.
    """
    N = len(targets_N)
    two = hidden_NH.is_cuda and not keep
    factors = None if fp8 is None else (cast_rows(hidden_NH), fp8)
    parts = column_parts(N, len(weight_VH), hidden_NH.element_size(), limit // 2 if two else limit)
    buffers = [hidden_NH.new_empty(N * longest(parts)) for _ in range(2 if two and len(parts) > 1 else 1)]
    stats_PN4 = torch.empty((len(parts), N, 4), dtype=torch.float32, device=hidden_NH.device)
    streams = (
        (torch.cuda.current_stream(hidden_NH.device), second_stream(hidden_NH.device)) if len(buffers) > 1 else None
    )
    read: list[torch.cuda.Event] = []  # the statistics of each range are done, its buffer free
    for i, (part, stats_N4) in enumerate(zip(parts, stats_PN4, strict=True)):
        if streams and i >= 2:
            streams[0].wait_event(read[i - 2])
        logits_NC = part_logits(hidden_NH, weight_VH, part, buffers[i % len(buffers)], fp8=factors)
        if streams:
            streams[1].wait_stream(streams[0])
        with torch.cuda.stream(streams[1]) if streams else nullcontext():
            launch_stats(logits_NC, targets_N, part_shard(shard, part), temperature, None, entropy, stats_N4)
        if streams:
            read.append(streams[1].record_event())
    if streams:
        streams[0].wait_stream(streams[1])
    stats_WN4 = stats_PN4 if group is None else gather_stats(merge_shards(stats_PN4, temperature), group)
    saved_4N = torch.empty((4, N), dtype=torch.float32, device=hidden_NH.device)
    finish_rows(stats_WN4, targets_N, shard.vocab, temperature, None, saved_4N)
    return saved_4N, buffers[0]


def score_whole_rows(hidden_NH, weight_VH, targets_N, temperature, entropy, group, shard, rows=1024) -> torch.Tensor:
    """`score_columns` with the vocabulary in one piece: how it is cut depends on the number of rows, and so would a
    row's bits.
    """
    saved_4N = torch.empty((4, len(targets_N)), dtype=torch.float32, device=hidden_NH.device)
    stats_N4 = torch.empty((len(targets_N), 4), dtype=torch.float32, device=hidden_NH.device)
    for start in range(0, len(targets_N), rows):
        part = slice(start, start + rows)
        logits_RV = torch.mm(hidden_NH[part], weight_VH.T)
        launch_stats(logits_RV, targets_N[part], shard, temperature, None, entropy, stats_N4[part])
    stats_WN4 = stats_N4[None] if group is None else gather_stats(stats_N4, group)
    finish_rows(stats_WN4, targets_N, shard.vocab, temperature, None, saved_4N)
    return saved_4N


def triton_linear_logprob(
    hidden_NH, weight_VH, targets_N, *, temperature=1.0, entropy=False, group=None, vocab_size=None, fp8=None
):
    """See `linear_logprob`."""
    check_dtypes(hidden_NH, weight_VH)
    shard = vocab_shard(len(weight_VH), group, vocab_size)
    gradient = torch.is_grad_enabled() and (hidden_NH.requires_grad or weight_VH.requires_grad)
    return _LinearLogprob.apply(
        hidden_NH.contiguous(), weight_VH, targets_N.contiguous(), temperature, entropy, group, shard, gradient, fp8
    )


@dataclass
class _Job:
    """One call's inputs, rows already chosen, and its report."""

    targets_N: torch.Tensor
    terms: PolicyTerms
    settings: PolicySettings
    group: dist.ProcessGroup | None
    shard: Shard
    documents: Documents | None
    weight_grad_VH: torch.Tensor | None
    backward_rows: int  # rows past this one can have no gradient: forward only
    gradient: bool  # under no_grad the inputs still say that they need one
    fp8: Scaled | None
    saved_4N: torch.Tensor | None = None
    values: torch.Tensor | None = None
    sums: dict[str, torch.Tensor] | None = None


def _sequence_parts(documents: Documents, rows: int) -> list[slice] | None:
    """Chunks of whole documents of at most `rows` rows, or None when a document is longer or other ranks hold parts
    of it.
    """
    if documents.group is not None:
        return None
    numbers, counts = torch.unique_consecutive(documents.index_N, return_counts=True)
    if len(numbers) != len(torch.unique(numbers)):
        raise ValueError("doc_N: the tokens of a document must lie together")
    counts = counts.tolist()
    if max(counts, default=0) > rows:
        return None
    parts, start, end = [], 0, 0
    for count in counts:
        if end + count - start > rows:
            parts.append(slice(start, end))
            start = end
        end += count
    return [*parts, slice(start, end)]


def _coefficients(logprob_R, entropy_R, terms, settings, documents):
    """(d loss / d logprob, loss, sums) of a sequence objective, through autograd on a few floats a token."""
    with torch.enable_grad():
        live_R = logprob_R.detach().requires_grad_()
        loss, sums = reference_policy_terms(live_R, entropy_R, replace(terms, entropy_weight=None), settings, documents)
        (grad_R,) = torch.autograd.grad(loss, live_R)
    if terms.entropy_weight is not None:
        sums["entropy_loss"] = -(terms.entropy_weight * entropy_R).sum()
        loss = loss + sums["entropy_loss"]
    return grad_R.float().contiguous(), loss.detach(), sums


def _can_clip(terms: PolicyTerms, sequence: bool) -> bool:
    """Whether a row with a weight may turn out to have no gradient: only the clipped term, and not on-policy."""
    only_clipped = terms.kl_weight is None and terms.entropy_weight is None and terms.ce_weight is None
    return only_clipped and terms.pg_weight is not None and (terms.old_logprob is not None or sequence)


def _live_rows(grad_R: torch.Tensor) -> torch.Tensor | None:
    """Sources of the rows that have a gradient, moved to the front, or None when too few are without one to save a
    matmul tile.

    The places of rows without a gradient among the first are taken by rows from behind, so that in place nothing is
    overwritten that is still to be read. Costs a wait for the GPU.
    """
    live_R = grad_R != 0
    count = int(live_R.sum())
    if count > len(grad_R) - ROW_TILE:
        return None
    source_C = torch.arange(count, device=grad_R.device)
    source_C[~live_R[:count]] = torch.nonzero(live_R[count:])[:, 0] + count
    return source_C


class _PolicyLoss(torch.autograd.Function):
    """The whole loss; `backward` only scales gradients that the forward made."""

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, job: _Job):
        need_hidden, need_weight = (job.gradient and needed for needed in ctx.needs_input_grad[:2])
        N, columns = len(job.targets_N), len(weight_VH)
        settings, device = job.settings, hidden_NH.device
        dhidden_NH = torch.zeros_like(hidden_NH) if need_hidden else None
        dweight_VH = job.weight_grad_VH
        fresh = need_weight and dweight_VH is None
        if fresh:
            dweight_VH = torch.empty(weight_VH.shape, dtype=torch.float32, device=device)
        sequence = settings.by_sequence and job.terms.pg_weight is not None
        parts = row_parts(
            N, columns, hidden_NH.element_size(), GRAD_BYTES if need_hidden or need_weight else SCORE_BYTES
        )
        grad_N = torch.zeros(N, dtype=torch.float32, device=device)
        by_document = _sequence_parts(job.documents, longest(parts)) if sequence else parts
        scored = by_document is None
        if scored:
            # A document longer than a chunk: score everything first, at the price of a fourth matmul.
            score = (settings.temperature, True, job.group, job.shard, GRAD_BYTES)
            job.saved_4N, _ = score_columns(hidden_NH, weight_VH, job.targets_N, *score, fp8=job.fp8)
            grad_N, job.values, job.sums = _coefficients(*job.saved_4N[:2], job.terms, settings, job.documents)
        else:
            parts = by_document
            job.saved_4N = torch.zeros((4, N), dtype=torch.float32, device=device)
        buffer_RV = hidden_NH.new_empty((longest(parts), columns))
        clipping = _can_clip(job.terms, sequence)
        options = (job.shard, settings.temperature)
        totals: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
        for part in parts:
            backward = (need_hidden or need_weight) and part.start < job.backward_rows
            if scored and not backward:
                continue
            logits_RV = buffer_RV[: part.stop - part.start]
            if job.fp8 is None:
                torch.mm(hidden_NH[part], weight_VH.T, out=logits_RV)
            else:
                factors = (cast_rows(hidden_NH[part]), job.fp8)
                scaled_product(*factors, logits_RV.dtype, fast=True, out=logits_RV)
            terms_R, targets_R, saved_4R = job.terms.select(part), job.targets_N[part], job.saved_4N[:, part]
            if not scored:
                score_logits(logits_RV, targets_R, *options, None, True, job.group, saved_4R)
                if sequence:
                    grad_N[part], loss, sums = _coefficients(
                        saved_4R[0], saved_4R[1], terms_R, settings, job.documents.select(part)
                    )
                    totals.append((loss, sums))
                elif backward:
                    launch_terms(saved_4R[0], None, terms_R, settings, grad_N[part])
            if backward:
                # From here on the logits' memory holds their gradient: the products below read it, and the next
                # chunk writes over it.
                ge_R = None if terms_R.entropy_weight is None else -terms_R.entropy_weight.float()
                hidden_RH, grad_R = hidden_NH[part], grad_N[part]
                # Rows that clipping stopped have no gradient: both products leave them out.
                moved_C = _live_rows(grad_R) if clipping else None
                if moved_C is not None and len(moved_C) == 0:
                    continue
                if moved_C is None:
                    launch_backward(logits_RV, logits_RV, targets_R, saved_4R, grad_R, ge_R, *options)
                else:
                    few = (targets_R[moved_C], saved_4R[:, moved_C], grad_R[moved_C], None)
                    launch_backward(logits_RV, logits_RV[: len(moved_C)], *few, *options, source_N=moved_C)
                    logits_RV, hidden_RH = logits_RV[: len(moved_C)], hidden_RH.index_select(0, moved_C)
                if dhidden_NH is not None and moved_C is None:
                    torch.mm(logits_RV, weight_VH, out=dhidden_NH[part])
                elif dhidden_NH is not None:
                    dhidden_NH[part].index_copy_(0, moved_C, torch.mm(logits_RV, weight_VH))
                if need_weight:
                    add_matmul(dweight_VH, logits_RV.T, hidden_RH, fresh)
                    fresh = False
        if fresh:
            dweight_VH.zero_()
        if sequence and not scored:
            job.values = (
                torch.stack([loss for loss, _ in totals]).sum()
                if totals
                else hidden_NH.new_zeros((), dtype=torch.float32)
            )
            job.sums = (
                {name: torch.stack([sums[name].float() for _, sums in totals]).sum() for name in totals[0][1]}
                if totals
                else {}
            )
        elif not sequence:
            values = launch_terms(job.saved_4N[0], job.saved_4N[1], job.terms, settings, None)
            job.values, job.sums = values[-1], named_sums(values)
        if dhidden_NH is not None and job.group is not None:
            dist.all_reduce(dhidden_NH, group=job.group)
        ctx.save_for_backward(dhidden_NH, dweight_VH if need_weight and job.weight_grad_VH is None else None)
        ctx.exact = need_weight and job.weight_grad_VH is not None
        ctx.weight_dtype = weight_VH.dtype
        return job.values.float().clone()

    @staticmethod
    def backward(ctx, grad):
        dhidden_NH, dweight_VH = ctx.saved_tensors
        if ctx.exact:
            # The weight gradient is already in the caller's buffer, for an upstream gradient of 1.
            grad = torch.where(grad == 1, grad, torch.full_like(grad, torch.nan))
        dhidden_NH = None if dhidden_NH is None else dhidden_NH.mul_(grad)
        return dhidden_NH, None if dweight_VH is None else dweight_VH.mul_(grad).to(ctx.weight_dtype), None


def _row_order(
    terms: PolicyTerms, settings: PolicySettings, targets_N: torch.Tensor
) -> tuple[torch.Tensor | None, int]:
    """(rows to compute, or None for all in order; how many can have a gradient). Those that cannot come last."""
    active_N = terms.active(targets_N)
    moving_N = active_N
    if terms.pg_weight is not None and not settings.by_sequence:
        others = replace(terms, pg_weight=None).active(targets_N)
        moving_N = others | ((terms.pg_weight != 0) & (terms.advantage != 0))
    live, moving = torch.stack([active_N.sum(), moving_N.sum()]).tolist()
    if moving == len(targets_N):
        return None, moving
    if live == moving:
        return torch.nonzero(active_N)[:, 0], moving
    order = torch.argsort(torch.where(moving_N, 0, torch.where(active_N, 1, 2)), stable=True)
    return order[:live], moving


def triton_policy_loss(
    hidden_NH,
    weight_VH,
    targets_N,
    terms,
    settings,
    *,
    group=None,
    vocab_size=None,
    documents=None,
    weight_grad_VH=None,
    fp8=None,
) -> PolicyOutput:
    """See `linear_policy_loss`."""
    if weight_grad_VH is not None and (
        weight_grad_VH.dtype != torch.float32 or weight_grad_VH.shape != weight_VH.shape
    ):
        raise ValueError(f"weight_grad_VH must be fp32 of shape {tuple(weight_VH.shape)}")
    check_dtypes(hidden_NH, weight_VH)
    total = len(targets_N)
    rows, moving = _row_order(terms, settings, targets_N)
    if rows is not None:
        hidden_NH, targets_N, terms = (
            hidden_NH.index_select(0, rows),
            targets_N.index_select(0, rows),
            terms.select(rows),
        )
        documents = None if documents is None else documents.select(rows)
    shard, gradient = vocab_shard(len(weight_VH), group, vocab_size), torch.is_grad_enabled()
    job = _Job(targets_N.contiguous(), terms, settings, group, shard, documents, weight_grad_VH, moving, gradient, fp8)
    loss = _PolicyLoss.apply(hidden_NH.contiguous(), weight_VH, job)
    logprob_N, entropy_N = job.saved_4N[:2].unbind()
    if rows is not None:
        logprob_N, entropy_N = (v.new_zeros(total).index_copy(0, rows, v) for v in (logprob_N, entropy_N))
    want_entropy = settings.entropy or terms.entropy_weight is not None
    return PolicyOutput(loss, logprob_N, entropy_N if want_entropy else None, job.sums)
