"""Packing: sequences of any length into flat batches. Targets are shifted here, once.

A sequence of L ids becomes a document of L - 1 positions: position t holds id t and predicts id t + 1. Every per-token
array of a sequence is aligned with its ids (entry i belongs to predicting id i), so entry 0 is never used and its
weight must be 0. Shape suffixes: S sequences, N ids of all sequences end to end, B rows, L columns, T positions of one
batch.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..core.batch import PackedBatch
from .trajectory import Role, TokenSequence

# name on a sequence -> field of the batch
FIELDS = {
    "ce": "ce_weight_T",
    "pg": "pg_weight_T",
    "kl": "kl_weight_T",
    "entropy": "entropy_weight_T",
    "value": "value_weight_T",
    "advantage": "advantage_T",
    "old_logprob": "old_logprob_T",
    "ref_logprob": "ref_logprob_T",
    "returns": "return_T",
    "old_value": "old_value_T",
}
WEIGHTS = ("ce", "pg", "kl", "entropy", "value")
# a non-zero weight of the first needs the second
NEEDS = {"pg": "advantage", "kl": "ref_logprob", "value": "returns"}


@dataclass(frozen=True)
class TrainSequence:
    """A sequence with its loss terms; a missing array means that the term is not used."""

    ids: np.ndarray
    roles: np.ndarray | None = None
    ce: np.ndarray | None = None
    pg: np.ndarray | None = None
    kl: np.ndarray | None = None
    entropy: np.ndarray | None = None
    value: np.ndarray | None = None
    advantage: np.ndarray | None = None
    old_logprob: np.ndarray | None = None
    ref_logprob: np.ndarray | None = None
    returns: np.ndarray | None = None
    old_value: np.ndarray | None = None
    experts: np.ndarray | None = None  # int16 [ids, layers, experts of a token], see `Routing`
    source: int = 0  # the number of its trajectory

    @classmethod
    def of(cls, sequence: TokenSequence, source: int = 0, **arrays: np.ndarray) -> TrainSequence:
        """The sequence of a trajectory with its per-token arrays."""
        ids, roles = np.asarray(sequence.ids, dtype=np.int64), np.asarray(sequence.roles, dtype=np.int8)
        experts = None if sequence.experts is None else sequence.experts.array()
        return cls(ids, roles, **arrays, experts=experts, source=source)


def role_weight(sequence: TokenSequence, role: Role, weight: float = 1.0) -> np.ndarray:
    """`weight` on every token of a role and 0 elsewhere; the first id is never predicted and gets 0."""
    weights = np.where(np.asarray(sequence.roles) == role, np.float32(weight), np.float32(0))
    weights[:1] = 0
    return weights


@dataclass(frozen=True)
class SequenceTable:
    """Many sequences in flat arrays: what packing works on."""

    ids_N: np.ndarray
    starts_S: np.ndarray  # where each sequence begins in ids_N
    lengths_S: np.ndarray
    fields: dict[str, np.ndarray] = field(default_factory=dict)  # by name of FIELDS, each [N] float32
    experts_N: np.ndarray | None = None  # int16 [N, layers, experts of a token]

    def __len__(self) -> int:
        return len(self.lengths_S)

    @classmethod
    def of(cls, sequences: Sequence[TrainSequence]) -> SequenceTable:
        """Concatenate sequences; a field that only some of them have is 0 in the others."""
        if not sequences:
            raise ValueError("there is no sequence to pack")
        lengths_S = np.array([len(s.ids) for s in sequences], dtype=np.int64)
        ids_N = np.concatenate([np.asarray(s.ids, dtype=np.int64) for s in sequences])
        fields: dict[str, np.ndarray] = {}
        for name in FIELDS:
            arrays = [getattr(s, name) for s in sequences]
            if all(a is None for a in arrays):
                continue
            for i, (a, length) in enumerate(zip(arrays, lengths_S, strict=True)):
                if a is not None and len(a) != length:
                    raise ValueError(f"sequence {i}: {name} has {len(a)} entries for {length} ids")
            filled = [
                np.zeros(n, np.float32) if a is None else np.asarray(a, np.float32)
                for a, n in zip(arrays, lengths_S, strict=True)
            ]
            fields[name] = np.concatenate(filled)
        return cls(ids_N, np.cumsum(lengths_S) - lengths_S, lengths_S, fields, _experts(sequences))._checked()

    def _checked(self) -> SequenceTable:
        if (self.lengths_S < 2).any():
            raise ValueError(
                f"sequence {int(np.argmax(self.lengths_S < 2))} has fewer than 2 ids: nothing in it is predicted"
            )
        for name, values_N in self.fields.items():
            finite = np.isfinite(values_N)
            if not finite.all():
                at = int(np.argmax(~finite))
                raise ValueError(f"sequence {self._owner(at)}: {name} is {values_N[at]} at one token")
            if name in WEIGHTS and values_N[self.starts_S].any():
                which = int(np.argmax(values_N[self.starts_S] != 0))
                raise ValueError(
                    f"sequence {which}: {name} weighs its first id, which nothing predicts; set entry 0 to 0"
                )
        for weight, needed in NEEDS.items():
            if weight in self.fields and needed not in self.fields and self.fields[weight].any():
                raise ValueError(f"{weight} weights are set but no sequence has {needed}")
        return self

    def _owner(self, at: int) -> int:
        return int(np.searchsorted(self.starts_S, at, side="right")) - 1


def pack(sequences: Sequence[TrainSequence], *, budget: int | None = None) -> list[PackedBatch]:
    """Batches of at most `budget` positions by best fit; without a budget one batch of all."""
    table = SequenceTable.of(sequences)
    return [build_batch(table, chosen) for chosen in plan_batches(table.lengths_S - 1, budget)]


def plan_batches(sizes_S: np.ndarray, budget: int | None) -> list[np.ndarray]:
    """Which sequences share a batch: best fit, largest first. A sequence above the budget is an error."""
    count = len(sizes_S)
    if budget is None:
        return [np.arange(count)]
    _require_fit(sizes_S, budget)
    largest = int(sizes_S.max())
    if largest == int(sizes_S.min()):
        each = budget // largest
        return [np.arange(i, min(i + each, count)) for i in range(0, count, each)]
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free positions, bin), sorted
    for which in np.argsort(-sizes_S, kind="stable").tolist():
        size = int(sizes_S[which])
        at = bisect.bisect_left(room, (size, -1))
        if at == len(room):
            bins.append([which])
            bisect.insort(room, (budget - size, len(bins) - 1))
        else:
            free, chosen = room.pop(at)
            bins[chosen].append(which)
            bisect.insort(room, (free - size, chosen))
    return [np.array(sorted(b)) for b in bins]


def plan_ranks(
    sizes_S: np.ndarray, *, ranks: int, budget: int, hidden: int = 2048, each: int = 1
) -> list[list[np.ndarray]]:
    """The batches of each rank: equally many, a multiple of `each`, and of about the same cost in all.

    Sequences go to the least loaded rank, the costliest first; what a rank then has is packed. A rank with fewer
    batches than others halves its costliest ones, and takes empty ones when none is left to halve.
    """
    _require_fit(sizes_S, budget)
    # one layer: 24 h^2 a token, and 2 h L^2 of causal attention
    cost_S = sizes_S + sizes_S.astype(np.float64) ** 2 / (12 * hidden)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for which in np.argsort(-cost_S, kind="stable").tolist():
        load, rank = heapq.heappop(loads)
        shares[rank].append(which)
        heapq.heappush(loads, (load + float(cost_S[which]), rank))
    plans = []
    for share in shares:
        share_S = np.array(sorted(share), dtype=np.int64)
        plans.append([share_S[chosen] for chosen in plan_batches(sizes_S[share_S], budget)] if len(share_S) else [])
    wanted = -(-max(map(len, plans)) // each) * each
    for bins in plans:
        while len(bins) < wanted:
            at = max(
                (i for i, b in enumerate(bins) if len(b) > 1), key=lambda i: float(cost_S[bins[i]].sum()), default=None
            )
            if at is None:
                bins.append(np.array([], dtype=np.int64))
                continue
            falling = bins[at][np.argsort(-cost_S[bins[at]], kind="stable")]
            bins[at] = np.sort(falling[::2])
            bins.append(np.sort(falling[1::2]))
        bins.sort(key=lambda b: -float(cost_S[b].sum()))
    return plans


def _require_fit(sizes_S: np.ndarray, budget: int) -> None:
    largest = int(sizes_S.max())
    if largest > budget:
        which = int(sizes_S.argmax())
        raise ValueError(f"sequence {which} needs {largest} positions, the budget is {budget}; raise the budget")


def build_batch(table: SequenceTable, chosen: np.ndarray) -> PackedBatch:
    """One batch of the chosen sequences in that order."""
    spans = table.lengths_S[chosen] - 1
    ends = np.cumsum(spans)
    positions = np.arange(int(spans.sum())) - np.repeat(ends - spans, spans)
    index = np.repeat(table.starts_S[chosen], spans) + positions
    tensors = {FIELDS[name]: torch.from_numpy(values_N[index + 1]) for name, values_N in table.fields.items()}
    if table.experts_N is not None:  # experts of the token that is fed, not of the one that is predicted
        tensors["experts_T"] = torch.from_numpy(table.experts_N[index])
    return PackedBatch(
        tokens_T=torch.from_numpy(table.ids_N[index]),
        targets_T=torch.from_numpy(table.ids_N[index + 1]),
        positions_T=torch.from_numpy(positions),
        cu_seqlens_D1=torch.tensor([0, *ends.tolist()], dtype=torch.int32),
        max_seqlen=int(spans.max()),
        sequence_ids=tuple(int(i) for i in chosen),
        **tensors,
    )


def unpack(batches: Sequence[PackedBatch], values: Sequence[torch.Tensor | np.ndarray]) -> dict[int, np.ndarray]:
    """Per-position values of each batch back to sequences, by sequence id in rising order; entry 0 of each is 0."""
    if len(batches) != len(values):
        raise ValueError(f"{len(batches)} batches but {len(values)} arrays of values")
    found: dict[int, np.ndarray] = {}
    for batch, given in zip(batches, values, strict=True):
        values_T = given.detach().to("cpu").numpy() if isinstance(given, torch.Tensor) else np.asarray(given)
        if len(values_T) != batch.num_tokens:
            raise ValueError(f"{len(values_T)} values for a batch of {batch.num_tokens} positions")
        edges = batch.cu_seqlens_D1.tolist()
        for document, which in enumerate(batch.sequence_ids):
            first, last = edges[document], edges[document + 1]
            whole = np.zeros(last - first + 1, dtype=values_T.dtype)
            whole[1:] = values_T[first:last]
            found[which] = whole
    return dict(sorted(found.items()))


def _experts(sequences: Sequence[TrainSequence]) -> np.ndarray | None:
    """The expert choices of all sequences, concatenated; -1 (the model's own choice) for sequences without any."""
    shapes = {s.experts.shape[1:] for s in sequences if s.experts is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(f"sequences have experts of different models: {sorted(shapes)} layers and experts of a token")
    (shape,) = shapes
    parts = [np.full((len(s.ids), *shape), -1, np.int16) if s.experts is None else s.experts for s in sequences]
    for i, (part, s) in enumerate(zip(parts, sequences, strict=True)):
        if len(part) != len(s.ids):
            raise ValueError(f"sequence {i}: experts of {len(part)} tokens for {len(s.ids)} ids")
    return np.concatenate(parts)
