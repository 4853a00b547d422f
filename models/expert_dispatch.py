"""Tokens to experts and back. If all experts are on one rank: two gathers, without a device sync or an atomic addition.

Megatron's own dispatchers add the experts' outputs in bf16 by atomics, in any order, and read sizes back to the host in
every layer. Shape suffixes: T tokens, E experts, K experts of one token, N = T x K rows sorted by expert, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher

from .. import kernels
from ..kernels.rows import row_order


class _ToRows(torch.autograd.Function):
    """A copy of a token for each of its experts; the way back is `_ToTokens`."""

    @staticmethod
    def forward(ctx, x_TH: torch.Tensor, row_TK: torch.Tensor, token_N: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(row_TK)
        return x_TH.index_select(0, token_N)

    @staticmethod
    def backward(ctx, grad_NH: torch.Tensor):  # type: ignore[override]
        return kernels.sum_rows(grad_NH.contiguous(), *ctx.saved_tensors), None, None


class _ToTokens(torch.autograd.Function):
    """The sum of every token's rows; the way back is `_ToRows`."""

    @staticmethod
    def forward(ctx, x_NH: torch.Tensor, row_TK: torch.Tensor, token_N: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(token_N)
        return kernels.sum_rows(x_NH.contiguous(), row_TK)

    @staticmethod
    def backward(ctx, grad_TH: torch.Tensor):  # type: ignore[override]
        return grad_TH.index_select(0, *ctx.saved_tensors), None, None


class LocalDispatcher(MoEAllGatherTokenDispatcher):
    """Megatron's allgather dispatcher with nothing to gather: its work within the rank, in a fixed order."""

    def dispatch_postprocess(self, hidden_states, probs):
        map_TE: Any = self.routing_map
        self.token_N, expert_N, self.row_TK = row_order(map_TE, self.router_topk)
        probs_N = probs.reshape(-1).index_select(0, self.token_N * map_TE.shape[1] + expert_N)
        self.routing_map = None
        return _ToRows.apply(hidden_states, self.row_TK, self.token_N), map_TE.sum(0), probs_N

    def combine_preprocess(self, hidden_states):
        out_TH = _ToTokens.apply(hidden_states, self.row_TK, self.token_N)
        self.row_TK = self.token_N = None
        return out_TH


class HostDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all for gloo, which takes the sizes of what is exchanged as numbers, not as tensors."""

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        counts = super().preprocess(routing_map)
        sent: Any = self.input_splits
        received: Any = self.output_splits
        self.input_splits, self.output_splits = sent.tolist(), received.tolist()
        return counts


def choose_dispatcher(layer: Any) -> None:
    """Replace a layer's dispatcher if all its experts are whole on this rank, or if it is an all-to-all on a CPU."""
    if not isinstance(layer, MoELayer):
        return
    dispatcher: Any = layer.token_dispatcher
    kind: Any = None
    if dispatcher.tp_ep_group.size() == 1:
        kind = LocalDispatcher
    elif isinstance(dispatcher, MoEAlltoAllTokenDispatcher) and not torch.cuda.is_available():
        kind = HostDispatcher
    if kind is not None:
        layer.token_dispatcher = kind(
            layer.num_local_experts,
            layer.local_expert_indices,
            config=layer.config,
            pg_collection=get_default_pg_collection(),
        )
