"""Log-probability and entropy straight from hidden states and the output head, without a logits-sized tensor on CUDA.

Shape suffixes: N rows (tokens), H hidden, V vocabulary (this rank's shard).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .batch_invariant import is_batch_invariant
from .dispatch import use_triton
from .fp8 import Scaled, reference_cast_rows, reference_scaled_product
from .logprob import check_targets, check_temperature, reference_token_logprob


class SharedInput(torch.autograd.Function):
    """Identity forward; sums the gradient over the tensor-parallel ranks, each of which saw only its shard of the
    vocabulary.
    """

    @staticmethod
    def forward(ctx, hidden_NH, group):
        ctx.group = group
        return hidden_NH.view_as(hidden_NH)

    @staticmethod
    def backward(ctx, grad_NH):
        grad_NH = grad_NH.contiguous()
        dist.all_reduce(grad_NH, group=ctx.group)
        return grad_NH, None


class _ScaledLogits(torch.autograd.Function):
    """The head's product in fp8. The gradients are those of the product without rounding."""

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, fp8: Scaled):
        ctx.save_for_backward(hidden_NH, weight_VH)
        return reference_scaled_product(reference_cast_rows(hidden_NH), fp8, torch.float32)

    @staticmethod
    def backward(ctx, grad_NV):
        hidden_NH, weight_VH = ctx.saved_tensors
        dhidden_NH, dweight_VH = grad_NV @ weight_VH.float(), grad_NV.T @ hidden_NH.float()
        return dhidden_NH.to(hidden_NH.dtype), dweight_VH.to(weight_VH.dtype), None


def check_fp8_head(fp8: Scaled | None) -> None:
    """Refuse products in fp8 where a row's bits must not depend on its batch."""
    if fp8 is not None and is_batch_invariant():
        raise ValueError("batch_invariant: products in fp8 have no invariant form; set precision.fp8_head: false")


def reference_logits(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    group: dist.ProcessGroup | None,
    fp8: Scaled | None = None,
) -> torch.Tensor:
    """Logits with at least fp32 products and sums, of rounded factors where the head has a copy in fp8."""
    if group is not None:
        hidden_NH = SharedInput.apply(hidden_NH, group)
    if fp8 is not None:
        return _ScaledLogits.apply(hidden_NH, weight_VH, fp8)  # type: ignore[return-value]
    if hidden_NH.dtype == torch.float64:
        return hidden_NH @ weight_VH.double().T
    return hidden_NH.float() @ weight_VH.float().T


def reference_linear_logprob(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    fp8: Scaled | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Plain torch, differentiable through autograd; keeps the logits."""
    logits_NV = reference_logits(hidden_NH, weight_VH, group, fp8)
    return reference_token_logprob(
        logits_NV, targets_N, temperature=temperature, entropy=entropy, group=group, vocab_size=vocab_size
    )


def linear_logprob(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    fp8: Scaled | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability (and entropy) of each target in fp32, with gradients through both to `hidden_NH` and `weight_VH`.

    On CUDA the logits live in row chunks and the backward recomputes them; the weight gradient is summed in fp32.
    Without gradients (scoring the old or the reference policy) it costs one matmul. With `group`, `weight_VH` is this
    rank's shard of the vocabulary, in rank order, and `vocab_size` the real vocabulary when the last shard is padded.
    Under `batch_invariant()` a row's bits do not depend on the rows beside it. With `fp8`, copies of `weight_VH`, the
    logits are products in fp8, for scores without gradients.
    """
    check_temperature(temperature)
    check_fp8_head(fp8)
    if fp8 is not None and torch.is_grad_enabled() and (hidden_NH.requires_grad or weight_VH.requires_grad):
        raise ValueError("fp8: linear_logprob gives no gradients through products in fp8; use linear_policy_loss")
    world = 1 if group is None else dist.get_world_size(group)
    check_targets(targets_N, None, vocab_size or weight_VH.shape[0] * world)
    score = reference_linear_logprob
    if use_triton(hidden_NH):
        from .triton.linear import triton_linear_logprob as score
    return score(
        hidden_NH,
        weight_VH,
        targets_N,
        temperature=temperature,
        entropy=entropy,
        group=group,
        vocab_size=vocab_size,
        fp8=fp8,
    )
