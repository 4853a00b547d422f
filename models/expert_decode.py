"""A layer of experts while decoding, by the training forward's own operations on references to its weights.

Shape suffixes: T tokens, E experts, K experts of one token, N = T x K rows sorted by expert, H hidden, F width of an
expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..kernels import sum_rows, weighted_swiglu
from ..kernels.batch_invariant import is_batch_invariant
from ..kernels.rows import row_order
from .config import ModelConfig
from .expert_matmul import can_group, pack_in_place, product, stacked


@dataclass(frozen=True)
class ExpertWeights:
    """References to the parameters of one layer's router and experts."""

    router_EH: torch.Tensor
    fc1: tuple[torch.Tensor, ...]  # of each expert (2F, H)
    fc2: tuple[torch.Tensor, ...]  # of each expert (H, F)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.router_EH, *self.fc1, *self.fc2)


def expert_weights(named: Mapping[str, torch.Tensor], prefix: str, config: ModelConfig) -> ExpertWeights:
    """The weights of the layer whose names begin with `prefix`."""
    fc1, fc2 = (
        tuple(named[f"{prefix}mlp.experts.local_experts.{e}.linear_fc{n}.weight"] for e in range(config.experts))
        for n in (1, 2)
    )
    return ExpertWeights(named[f"{prefix}mlp.router.weight"], fc1, fc2)


def pack_experts(named: Mapping[str, torch.Tensor], config: ModelConfig) -> None:
    """Make each layer's experts contiguous, to be viewed as one tensor; for copied weights, not for parameters."""
    for i in range(config.layers if config.experts else 0):
        weights = expert_weights(named, f"decoder.layers.{i}.", config)
        pack_in_place(weights.fc1)
        pack_in_place(weights.fc2)


def route(x_TH: torch.Tensor, router_EH: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts (T, K), and their probabilities in fp32."""
    logits_TE = torch.mm(x_TH.float(), router_EH.float().t())
    if config.expert_weights_sum_to_one:
        scores_TK, chosen_TK = torch.topk(logits_TE, config.experts_per_token, 1)
        return chosen_TK, torch.softmax(scores_TK, -1)
    probs_TK, chosen_TK = torch.topk(torch.softmax(logits_TE, -1), config.experts_per_token, 1)
    return chosen_TK, probs_TK


def routed(
    x_TH: torch.Tensor, weights: ExpertWeights, config: ModelConfig, chosen: list[torch.Tensor] | None = None
) -> torch.Tensor:
    """The experts' output for every token; appends the chosen experts (T, K) to `chosen`."""
    chosen_TK, probs_TK = route(x_TH, weights.router_EH, config)
    if chosen is not None:
        chosen.append(chosen_TK)
    grouped = can_group(x_TH) and not is_batch_invariant()
    fc1 = fc2 = None
    if grouped:
        fc1, fc2 = stacked(weights.fc1), stacked(weights.fc2)
    shape = (len(x_TH), config.experts)
    map_TE = torch.zeros(shape, dtype=torch.bool, device=x_TH.device).scatter_(1, chosen_TK, True)
    probs_TE = torch.zeros(shape, device=x_TH.device).scatter_(1, chosen_TK, probs_TK)
    token_N, expert_N, row_TK = row_order(map_TE, config.experts_per_token)
    rows_NH, probs_N = x_TH.index_select(0, token_N), probs_TE.view(-1)[token_N * config.experts + expert_N]
    if fc1 is not None and fc2 is not None:
        ends_E = map_TE.sum(0).cumsum(0, dtype=torch.int32)
        gates_N2F = product(rows_NH, fc1.transpose(1, 2), ends_E)
        return sum_rows(product(weighted_swiglu(gates_N2F, probs_N), fc2.transpose(1, 2), ends_E), row_TK)
    counts = map_TE.sum(0).tolist()
    outs = []
    for up, down, rows, probs in zip(
        weights.fc1, weights.fc2, rows_NH.split(counts), probs_N.split(counts), strict=True
    ):
        gate, linear = F.linear(rows, up).chunk(2, -1)
        outs.append(F.linear((F.silu(gate) * linear * probs[:, None]).to(rows.dtype), down))
    return sum_rows(torch.cat(outs), row_TK)
