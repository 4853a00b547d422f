"""The packed batch: what the engine trains on and scores.

Shape suffixes: T tokens of all documents end to end, D documents.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch


@dataclass(frozen=True)
class PackedBatch:
    """Documents laid end to end. Every per-token field is aligned with `targets_T`: entry t belongs to the token
    predicted at t.

    A weight is the factor of that token's term in the summed loss, normalisation included, so that a sum over
    microbatches and data-parallel ranks is the whole loss. A missing field means that term is not used.
    """

    tokens_T: torch.Tensor
    targets_T: torch.Tensor
    positions_T: torch.Tensor
    cu_seqlens_D1: torch.Tensor  # int32, starts at 0, ends at T; the last document may be padding
    max_seqlen: int
    ce_weight_T: torch.Tensor | None = None  # imitation and world-modelling
    pg_weight_T: torch.Tensor | None = None  # policy gradient
    kl_weight_T: torch.Tensor | None = None
    entropy_weight_T: torch.Tensor | None = None
    advantage_T: torch.Tensor | None = None
    old_logprob_T: torch.Tensor | None = None
    ref_logprob_T: torch.Tensor | None = None
    value_weight_T: torch.Tensor | None = None
    return_T: torch.Tensor | None = None
    old_value_T: torch.Tensor | None = None
    # (T, layers, experts per token), int16: the experts that the sampler chose for the token fed at t; -1 where
    # the model chooses for itself
    experts_T: torch.Tensor | None = None
    sequence_ids: tuple[int, ...] = ()  # the input sequence of each document; padding has none

    @property
    def num_tokens(self) -> int:
        return self.tokens_T.numel()

    def without_experts(self) -> PackedBatch:
        """The batch without routing, for a model other than the one that was sampled from."""
        return replace(self, experts_T=None)

    def to(self, device: torch.device | str) -> PackedBatch:
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(
            self, **{k: v.to(device, non_blocking=True) for k, v in moved.items() if isinstance(v, torch.Tensor)}
        )
