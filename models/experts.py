"""All experts of a rank at once: two grouped matrix products, where Megatron runs two small ones per expert.

Parameters stay Megatron's, one pair per expert, so names, shards, checkpoints and weight sync are not affected. They
are adjacent in its buffers, and the products read them there. Shape suffixes: N rows (a token has one for each of its
experts on this rank), E experts, H hidden, F width of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP

from .. import kernels
from ..core.mcore.wgrad import add_weight_grad
from ..kernels.batch_invariant import is_batch_invariant
from .expert_matmul import can_group, evenly_spaced, pack_in_place, product, stacked


def _weight_grads(
    weights: list, inputs_NK: torch.Tensor, grads_NM: torch.Tensor, counts: list[int]
) -> list[torch.Tensor | None]:
    """Every expert's weight gradient: added to its fp32 buffer where it has one, else returned.

    One product each: the grouped one rounds to bf16, and on some devices leaves garbage for an expert without rows.
    """
    found: list[torch.Tensor | None] = []
    unread = None  # autograd wants a tensor even if the gradient was already added; the experts' dummies share memory
    for weight, x, grad in zip(weights, inputs_NK.split(counts), grads_NM.split(counts), strict=True):
        total = getattr(weight, "main_grad", None)
        if not weight.requires_grad:
            found.append(None)
        elif total is None:
            found.append(grad.t() @ x)
        else:
            add_weight_grad(x, grad, total)
            weight.grad_added_to_main_grad = True  # Megatron's hook then only counts the gradient
            unread = torch.empty_like(weight) if unread is None else unread
            found.append(unread.view_as(weight))
    return found


class HostCounts:
    """Counts being copied to the host, without blocking the forward pass."""

    def __init__(self, counts_E: torch.Tensor) -> None:
        self.counts_E = counts_E.to("cpu", non_blocking=True)
        self.copied = torch.cuda.current_stream().record_event() if counts_E.is_cuda else None

    def read(self) -> list[int]:
        """Wait for the counts and return them."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.counts_E.tolist()


class _Experts(torch.autograd.Function):
    """fc1, the gate weighted by the router's probability, fc2. The backward pass recomputes the weighted product."""

    @staticmethod
    def forward(
        ctx,
        x_NH: torch.Tensor,
        probs_N: torch.Tensor,
        counts_E: torch.Tensor,
        fc1_E2FH: torch.Tensor,
        fc2_EHF: torch.Tensor,
        *weights: torch.Tensor,
    ):
        ends_E = counts_E.cumsum(0, dtype=torch.int32).to(x_NH.device, non_blocking=True)
        gates_N2F = product(x_NH, fc1_E2FH.transpose(1, 2), ends_E)
        ctx.save_for_backward(x_NH, probs_N, ends_E, gates_N2F, fc1_E2FH, fc2_EHF, *weights)
        ctx.counts = HostCounts(counts_E)
        return product(kernels.weighted_swiglu(gates_N2F, probs_N), fc2_EHF.transpose(1, 2), ends_E)

    @staticmethod
    def backward(ctx, grad_NH: torch.Tensor):  # type: ignore[override]
        x_NH, probs_N, ends_E, gates_N2F, fc1_E2FH, fc2_EHF, *weights = ctx.saved_tensors
        counts, grad_NH = ctx.counts.read(), grad_NH.contiguous()
        fc1, fc2 = weights[: len(counts)], weights[len(counts) :]
        dy_NF = product(grad_NH, fc2_EHF, ends_E)
        dgates_N2F, dprobs_N, y_NF = kernels.weighted_swiglu_backward(gates_N2F, probs_N, dy_NF)
        dfc2 = _weight_grads(fc2, y_NF, grad_NH, counts)
        dfc1 = _weight_grads(fc1, x_NH, dgates_N2F, counts)
        dx_NH = product(dgates_N2F, fc1_E2FH, ends_E) if ctx.needs_input_grad[0] else None
        return dx_NH, dprobs_N, None, None, None, *dfc1, *dfc2


def grouped_experts(
    x_NH: torch.Tensor,
    probs_N: torch.Tensor,
    counts_E: torch.Tensor,
    fc1: list[torch.Tensor],
    fc2: list[torch.Tensor],
    joined: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Gated experts over rows that are sorted by expert, with the number of rows of each; a row's output is weighted by
    its probability. `joined` are the same weights as one tensor each.
    """
    if not counts_E.is_cuda and counts_E.sum() != len(x_NH):
        raise ValueError(f"{len(x_NH)} rows for experts that were given {counts_E.sum()}")
    joined = joined or (stacked(fc1), stacked(fc2))
    return _Experts.apply(x_NH.contiguous(), probs_N, counts_E, *joined, *fc1, *fc2)


class _LastFirst(torch.nn.ModuleList):
    """Experts whose parameters are named from last to first: Megatron fills its buffers backwards, so that they end up
    in order there.
    """

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True):
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for name, module in reversed(self._modules.items()):
            if module is not None:
                yield from module.named_modules(memo, f"{prefix}.{name}" if prefix else name, remove_duplicate)


class GroupedExperts(SequentialMLP):
    """Megatron's experts, computed together where the device can; one after the other elsewhere, cut over tensor
    ranks, or adapted.
    """

    _found: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
    _joined: tuple[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] | None = None  # where they lay, and views

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.local_experts = _LastFirst(self.local_experts)

    def joined(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Both weights of all experts as one tensor each, without a copy; None where a buffer has gaps."""
        fc1, fc2 = self._weights()
        ends = (fc1[0], fc1[-1], fc2[0], fc2[-1])
        if self._joined is None or self._joined[0] != tuple(w.data_ptr() for w in ends):
            self._joined = None
            for weights in (fc1, fc2):
                if not any(hasattr(w, "main_grad") for w in weights):  # not in an optimizer's buffer
                    pack_in_place(weights)
            if evenly_spaced(fc1) and evenly_spaced(fc2):
                views = stacked(fc1), stacked(fc2)
                self._joined = tuple(w.data_ptr() for w in ends), views
        return self._joined[1] if self._joined else None

    def _weights(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Both weights of every expert; empty if experts must run one by one. Looked up once, which is slow for 128
        experts.
        """
        if self._found is None:
            experts: Any = list(self.local_experts)
            linears = [linear for expert in experts for linear in (expert.linear_fc1, expert.linear_fc2)]
            plain = all(type(m) in (ColumnParallelLinear, RowParallelLinear) and not m._forward_hooks for m in linears)
            even = all(size % 8 == 0 for m in linears for size in m.weight.shape)  # rows of 16 bytes in bf16
            if plain and even and len(experts) > 1 and self.tp_group.size() == 1:
                self._found = [e.linear_fc1.weight for e in experts], [e.linear_fc2.weight for e in experts]
            else:
                self._found = [], []
        return self._found

    def forward(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs):
        fc1, fc2 = self._weights()
        if not fc1 or not can_group(permuted_local_hidden_states) or is_batch_invariant():
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        out = grouped_experts(permuted_local_hidden_states, permuted_probs, tokens_per_expert, fc1, fc2, self.joined())
        return out, None
