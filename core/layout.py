"""How the documents of a packed batch are laid out: padding, context-parallel slices and attention segments, all
computed on the host.

A segment is a run of local queries of one document and the keys they may see; the last query sees the last key (causal,
aligned at the end), so one description serves whole documents and the slices of context parallelism. Shape suffixes: T
local tokens, S tokens of all context ranks, N segments of a group, Q and K their query and key lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch

from .batch import PackedBatch


@dataclass(frozen=True)
class SegmentGroup:
    """Segments of equal lengths. An index of None means: all rows, in order."""

    count: int
    q_len: int
    k_len: int
    q_rows: torch.Tensor | None  # (N*Q)
    k_rows: torch.Tensor | None  # (N*K)


@dataclass(frozen=True)
class DocumentLayout:
    """What attention needs to know about a packed batch; moved to the device once per microbatch."""

    groups: tuple[SegmentGroup, ...]
    restore_T: torch.Tensor | None  # position of each local token in the concatenated outputs of the groups
    cu_q: torch.Tensor  # int32, for variable-length kernels
    cu_k: torch.Tensor
    max_q: int
    max_k: int
    k_rows: torch.Tensor | None  # keys of all segments end to end, in the global order
    k_order_S: torch.Tensor | None  # global order of the keys gathered over context ranks
    document_T: torch.Tensor  # document of each local token
    balance_D: torch.Tensor | None = None  # of all documents: weight of their experts' balance, see `balance_weights`

    def to(self, device: torch.device) -> DocumentLayout:
        def move(value: Any) -> Any:
            return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value

        groups = tuple(replace(g, q_rows=move(g.q_rows), k_rows=move(g.k_rows)) for g in self.groups)
        return replace(
            self, **{f.name: move(getattr(self, f.name)) for f in fields(self) if f.name != "groups"}, groups=groups
        )


def context_rows(tokens: int, ranks: int, rank: int) -> torch.Tensor:
    """Global rows held by one context rank: the chunks `rank` and `2 ranks - 1 - rank` of `2 ranks`, which balances
    causal work.
    """
    if ranks == 1:
        return torch.arange(tokens)
    chunk = tokens // (2 * ranks)
    first, second = rank, 2 * ranks - 1 - rank
    return torch.cat(
        [torch.arange(first * chunk, (first + 1) * chunk), torch.arange(second * chunk, (second + 1) * chunk)]
    )


def document_layout(cu_seqlens: list[int], context: int = 1, rank: int = 0) -> DocumentLayout:
    """Segments of one context rank over documents bounded by `cu_seqlens`."""
    total = cu_seqlens[-1]
    chunk = total // (2 * context)
    spans = [(0, total, 0)]
    if context > 1:
        spans = [(c * chunk, (c + 1) * chunk, i * chunk) for i, c in enumerate((rank, 2 * context - 1 - rank))]
    segments: list[tuple[int, int, int, int]] = []  # local query start, query length, key start, key length
    document = torch.empty(total // context, dtype=torch.long)
    for low, high, offset in spans:
        for index, (start, end) in enumerate(pairwise(cu_seqlens)):
            a, b = max(start, low), min(end, high)
            if a < b:
                segments.append((offset + a - low, b - a, start, b - start))
                document[offset + a - low : offset + b - low] = index
    by_size: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for q0, q, k0, k in segments:
        by_size.setdefault((q, k), []).append((q0, k0))

    def rows(starts: list[int], length: int) -> torch.Tensor:
        return (torch.tensor(starts)[:, None] + torch.arange(length)).reshape(-1)

    whole = context == 1 and len(by_size) == 1
    groups = tuple(
        SegmentGroup(
            len(at),
            q,
            k,
            None if whole else rows([s[0] for s in at], q),
            None if whole else rows([s[1] for s in at], k),
        )
        for (q, k), at in by_size.items()
    )
    restore = None if whole else torch.argsort(torch.cat([g.q_rows for g in groups if g.q_rows is not None]))
    k_order = None
    k_rows = None
    if context > 1:
        k_order = torch.argsort(torch.cat([context_rows(total, context, r) for r in range(context)]))
        k_rows = torch.cat([torch.arange(k0, k0 + k) for _, _, k0, k in segments])
    zero = torch.zeros(1, dtype=torch.long)
    return DocumentLayout(
        groups=groups,
        restore_T=restore,
        cu_q=torch.cat([zero, torch.tensor([s[1] for s in segments]).cumsum(0)]).int(),
        cu_k=torch.cat([zero, torch.tensor([s[3] for s in segments]).cumsum(0)]).int(),
        max_q=max(s[1] for s in segments),
        max_k=max(s[3] for s in segments),
        k_rows=k_rows,
        k_order_S=k_order,
        document_T=document,
    )


def pad_batch(batch: PackedBatch, length: int) -> PackedBatch:
    """Pad to `length` tokens with documents no longer than the batch's longest. Padding has weight zero everywhere."""
    extra = length - batch.num_tokens
    if extra == 0:
        return batch
    bounds = [batch.num_tokens]
    while bounds[-1] < length:
        bounds.append(min(length, bounds[-1] + batch.max_seqlen))
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(bounds)])
    changed: dict = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if field.name.endswith("_T") and value is not None:
            blank = -1 if field.name == "experts_T" else 0
            changed[field.name] = torch.cat([value, value.new_full((extra, *value.shape[1:]), blank)])
    changed["positions_T"][batch.num_tokens :] = positions.to(batch.positions_T)
    changed["cu_seqlens_D1"] = torch.cat([batch.cu_seqlens_D1, torch.tensor(bounds[1:]).to(batch.cu_seqlens_D1)])
    return replace(batch, **changed)


def slice_batch(batch: PackedBatch, rows: torch.Tensor) -> PackedBatch:
    """The per-token fields of some rows; `cu_seqlens_D1` still bounds the whole documents."""
    per_token = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name.endswith("_T")}
    return replace(batch, **{name: value[rows] for name, value in per_token.items() if value is not None})


def trained_lengths(batch: PackedBatch) -> torch.Tensor:
    """Lengths of a whole batch's documents; 0 for documents without any loss term, such as padding."""
    lengths_D = batch.cu_seqlens_D1.diff()
    used_D = torch.zeros_like(lengths_D, dtype=torch.bool)
    document_T = torch.repeat_interleave(torch.arange(len(lengths_D), device=lengths_D.device), lengths_D)
    for field in fields(batch):
        weight_T = getattr(batch, field.name) if field.name.endswith("_weight_T") else None
        if weight_T is not None:
            used_D[document_T.to(weight_T.device)[weight_T != 0].to(used_D.device)] = True
    return torch.where(used_D, lengths_D, 0)


def balance_weights(lengths_D: torch.Tensor, total: float, coefficient: float) -> torch.Tensor:
    """Weights of the documents' router counts that make the sum over a step's documents a mean over its `total` tokens,
    however documents are split over ranks.
    """
    return torch.where(lengths_D > 0, coefficient / (lengths_D.clamp(min=1) * total), 0.0).float()
