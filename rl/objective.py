"""The one loss: a packed batch's per-token weights and terms through the head-and-loss kernel."""

from __future__ import annotations

from typing import Any

import torch

from ..core.batch import PackedBatch
from ..kernels.policy_loss import PolicySettings, PolicyTerms, linear_policy_loss


def terms_of(batch: PackedBatch) -> PolicyTerms:
    """The kernel's view of a batch."""
    return PolicyTerms(
        ce_weight=batch.ce_weight_T,
        pg_weight=batch.pg_weight_T,
        kl_weight=batch.kl_weight_T,
        entropy_weight=batch.entropy_weight_T,
        advantage=batch.advantage_T,
        old_logprob=batch.old_logprob_T,
        ref_logprob=batch.ref_logprob_T,
    )


def document_index(batch: PackedBatch) -> torch.Tensor:
    """The document each position belongs to."""
    lengths_D = batch.cu_seqlens_D1.diff().long()
    return torch.repeat_interleave(torch.arange(len(lengths_D), device=lengths_D.device), lengths_D)


def make_loss(settings: PolicySettings):
    """A loss for the engine. Beside the kernel's sums it measures the drift between sampler and trainer log-probs."""

    def loss(hidden_TH: torch.Tensor, head: Any, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        output = linear_policy_loss(
            hidden_TH,
            head.weight_VH,
            batch.targets_T,
            terms_of(batch),
            settings,
            group=head.group,
            vocab_size=head.vocab_size,
            doc_N=document_index(batch) if settings.by_sequence else None,
        )
        sums = dict(output.sums)
        if batch.old_logprob_T is not None and batch.pg_weight_T is not None:
            drift_T = (output.logprob_N - batch.old_logprob_T).abs() * (batch.pg_weight_T != 0)
            sums["drift"] = drift_T.sum()
        return output.loss, sums

    return loss
