"""The one loss: a packed batch's per-token weights and terms through the head-and-loss kernel."""

from __future__ import annotations

import torch

from ..core.batch import PackedBatch
from ..core.engine import Head
from ..kernels.linear_logprob import linear_logprob
from ..kernels.policy import PolicySettings, PolicyTerms, kl_estimate
from ..kernels.policy_loss import linear_policy_loss

POSITIVE = 1e-5  # a log-prob may exceed 0 by rounding only


def terms_of(batch: PackedBatch) -> PolicyTerms:
    """The batch's fields as the kernel takes them."""
    return PolicyTerms(
        ce_weight=batch.ce_weight_T,
        pg_weight=batch.pg_weight_T,
        kl_weight=batch.kl_weight_T,
        entropy_weight=batch.entropy_weight_T,
        advantage=batch.advantage_T,
        old_logprob=batch.old_logprob_T,
        ref_logprob=batch.ref_logprob_T,
    )


def make_loss(settings: PolicySettings):
    """A loss for the engine. Besides the kernel's sums it measures the health of a step: drift between sampler and
    trainer log-probs, KL to the reference where known, and log-probs above 0."""

    def loss(hidden_TH: torch.Tensor, head: Head, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        output = linear_policy_loss(
            hidden_TH,
            head.weight_VH,
            batch.targets_T,
            terms_of(batch),
            settings,
            group=head.group,
            vocab_size=head.vocab_size,
            doc_N=head.document_T if settings.by_sequence else None,
            doc_group=head.context_group,
            weight_grad_VH=head.weight_grad_VH,
            fp8=head.fp8,
        )
        sums = {**output.sums, "loss": output.loss.detach(), "impossible": (output.logprob_N > POSITIVE).sum()}
        if batch.pg_weight_T is not None:
            sampled_T = batch.pg_weight_T != 0
            if batch.old_logprob_T is not None:
                sums["drift"] = ((output.logprob_N - batch.old_logprob_T).abs() * sampled_T).sum()
            if batch.ref_logprob_T is not None:
                sums["reference_kl"] = (kl_estimate(output.logprob_N, batch.ref_logprob_T, settings) * sampled_T).sum()
        return output.loss, sums

    return loss


def logprob_score(temperature: float):
    """A score for the engine: the log-prob of every target at the sampler's temperature."""

    def score(hidden_TH: torch.Tensor, head: Head, batch: PackedBatch) -> dict[str, torch.Tensor]:
        logprob_T, _ = linear_logprob(
            hidden_TH,
            head.weight_VH,
            batch.targets_T,
            temperature=temperature,
            group=head.group,
            vocab_size=head.vocab_size,
            fp8=head.fp8,
        )
        return {"logprob": logprob_T}

    return score
