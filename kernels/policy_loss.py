"""The loss of a packed batch from hidden states: policy gradient, cross-entropy, KL and entropy terms
(kernels/policy.py) behind one call.

Shape suffixes: N rows (tokens), H hidden, V vocabulary (this rank's shard), D documents.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .dispatch import use_triton
from .fp8 import Scaled
from .linear_logprob import check_fp8_head, reference_logits
from .logprob import check_targets, reference_token_logprob
from .policy import Documents, PolicyOutput, PolicySettings, PolicyTerms, check_terms, reference_policy_terms


def reference_policy_loss(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    terms: PolicyTerms,
    settings: PolicySettings,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    documents: Documents | None = None,
    fp8: Scaled | None = None,
) -> PolicyOutput:
    """Plain torch through autograd; only rows with a weight are computed."""
    total = len(targets_N)
    rows = torch.nonzero(terms.active(targets_N))[:, 0]
    want_entropy = settings.entropy or terms.entropy_weight is not None
    logits_RV = reference_logits(hidden_NH.index_select(0, rows), weight_VH, group, fp8)
    logprob_R, entropy_R = reference_token_logprob(
        logits_RV,
        targets_N.index_select(0, rows),
        temperature=settings.temperature,
        entropy=want_entropy,
        group=group,
        vocab_size=vocab_size,
    )
    if entropy_R is not None and terms.entropy_weight is None:
        entropy_R = entropy_R.detach()
    loss, sums = reference_policy_terms(
        logprob_R, entropy_R, terms.select(rows), settings, None if documents is None else documents.select(rows)
    )
    logprob_N = logprob_R.new_zeros(total).index_copy(0, rows, logprob_R.detach())
    entropy_N = None if entropy_R is None else entropy_R.new_zeros(total).index_copy(0, rows, entropy_R.detach())
    return PolicyOutput(loss, logprob_N, entropy_N, sums)


def linear_policy_loss(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    terms: PolicyTerms,
    settings: PolicySettings,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    doc_N: torch.Tensor | None = None,
    doc_group: dist.ProcessGroup | None = None,
    weight_grad_VH: torch.Tensor | None = None,
    fp8: Scaled | None = None,
) -> PolicyOutput:
    """Loss and report of a packed batch from hidden states and the output head.

    On CUDA the gradients are made in the forward: three matmuls, row chunks, no logits-sized tensor. `weight_grad_VH`
    is an fp32 buffer (the optimizer's) that the head's gradient is then added into directly, for a loss whose upstream
    gradient is 1; any other upstream gradient turns the hidden gradient into NaN rather than into a wrong step.
    `doc_group` are the ranks that hold other tokens of the same documents. With `fp8`, a copy of `weight_VH`, the
    logits are products in fp8.
    """
    check_fp8_head(fp8)
    documents = None if doc_N is None else Documents(doc_N, doc_group)
    check_terms(terms, settings, len(targets_N), documents)
    world = 1 if group is None else dist.get_world_size(group)
    if not targets_N.is_cuda:
        check_targets(targets_N, terms.active(targets_N), vocab_size or weight_VH.shape[0] * world)
    if use_triton(hidden_NH):
        from .triton.linear import triton_policy_loss

        return triton_policy_loss(
            hidden_NH,
            weight_VH,
            targets_N,
            terms,
            settings,
            group=group,
            vocab_size=vocab_size,
            documents=documents,
            weight_grad_VH=weight_grad_VH,
            fp8=fp8,
        )
    if weight_grad_VH is not None:
        raise ValueError("weight_grad_VH is for the CUDA path; on CPU the gradient comes through autograd")
    return reference_policy_loss(
        hidden_NH,
        weight_VH,
        targets_N,
        terms,
        settings,
        group=group,
        vocab_size=vocab_size,
        documents=documents,
        fp8=fp8,
    )
