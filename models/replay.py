"""Routers that take the sampler's choices: a token goes to the experts it went to when it was sampled, and its gates
are computed anew from the trainer's logits for these. And the loss that keeps choices even.

Shape suffixes: T local tokens, L layers, K experts of one token, E experts, D documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer

from ..core.errors import ConfigError
from ..core.layout import DocumentLayout


class _AddLoss(torch.autograd.Function):
    """Passes `x` on; the way back adds the gradient of the sum of `probs` times `factor`, as a loss would."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, probs: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[override]
        return grad, *ctx.saved_tensors, None


@dataclass(frozen=True)
class Balance:
    """The loss of uneven choices: E times the sum over experts of the share of a document's choices that went there
    and the mean probability of it, averaged over the step's tokens; 1 where choices are even. Documents are whole,
    whichever ranks hold them, so that no layout changes it.
    """

    document_T: torch.Tensor  # of the tokens that this rank's routers see
    weight_D: torch.Tensor
    group: Any  # ranks that hold the other tokens of these documents; None where there are none

    def add(self, x_TK: torch.Tensor, probs_TE: torch.Tensor, chosen_TK: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(`x_TK`, whose gradient will bring that of the loss, the loss of this rank's tokens)."""
        (experts, chosen), documents = (probs_TE.shape[1], chosen_TK.shape[1]), len(self.weight_D)
        with torch.no_grad():
            place_TK = self.document_T[:, None] * experts + chosen_TK
            counts_DE = torch.bincount(place_TK.flatten(), minlength=documents * experts).view(documents, experts)
            if self.group is not None:
                dist.all_reduce(counts_DE, group=self.group)
            factor_DE = counts_DE * self.weight_D[:, None] * (experts / chosen)
            factor_TE = factor_DE[self.document_T].to(probs_TE.dtype)
        return _AddLoss.apply(x_TK, probs_TE, factor_TE), (probs_TE.detach() * factor_TE).sum(dtype=torch.float64)


def balance_of(layout: DocumentLayout, config: Any) -> Balance | None:
    """What a batch asks of the routers of this rank."""
    if layout.balance_D is None:
        return None
    document_T, size = layout.document_T, config.tensor_model_parallel_size
    if config.sequence_parallel:
        document_T = document_T.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
    shared = size * config.context_parallel_size > 1
    group = parallel_state.get_tensor_and_context_parallel_group() if shared else None
    return Balance(document_T, layout.balance_D, group)


class Replay:
    """What Megatron's router asks for its experts. `given_TK` has -1 for tokens that it routes by itself."""

    def __init__(self, probabilities: bool = False) -> None:
        self.probabilities = probabilities  # of all experts, instead of logits, are what the router gives
        self.given_TK: torch.Tensor | None = None
        self.counts_2: torch.Tensor | None = None  # choices given so far, and those it would not have made
        self.balance: Balance | None = None
        self.loss: torch.Tensor | None = None  # of uneven choices so far

    def get_replay_topk(self, scores_TE: torch.Tensor, topk: int, groups: Any, group_topk: Any, choose: Any):
        """(scores, experts) of every token, under the name that Megatron calls."""
        found_TK, used_TK = self._choose(scores_TE, topk, groups, group_topk, choose)
        if self.balance is not None and torch.is_grad_enabled():
            probs_TE = scores_TE if self.probabilities else scores_TE.softmax(-1)
            found_TK, loss = self.balance.add(found_TK, probs_TE, used_TK)
            self.loss = loss if self.loss is None else self.loss + loss
        return found_TK, used_TK

    def _choose(self, scores_TE: torch.Tensor, topk: int, groups: Any, group_topk: Any, choose: Any):
        own_TK, chosen_TK = choose(scores_TE, topk, num_groups=groups, group_topk=group_topk)
        if self.given_TK is None:
            return own_TK, chosen_TK
        given_T = self.given_TK[:, 0] >= 0
        used_TK = torch.where(given_T[:, None], self.given_TK.long(), chosen_TK)
        agrees_T = (chosen_TK[:, :, None] == used_TK[:, None, :]).any(2).all(1)
        counts_2 = torch.stack([given_T.sum(), (~agrees_T).sum()])
        self.counts_2 = counts_2 if self.counts_2 is None else self.counts_2 + counts_2
        return scores_TE.gather(1, used_TK), used_TK


def attach_replay(layer: Any) -> Replay | None:
    """Let a layer's router take given choices, where it has one."""
    if not isinstance(layer, MoELayer):
        return None
    router: Any = layer.router
    router.router_replay = replay = Replay(router.config.moe_router_pre_softmax)
    return replay


def local_experts(experts_TLK: torch.Tensor | None, config: Any) -> torch.Tensor | None:
    """The choices for the tokens that this rank's routers see, checked against the model."""
    if experts_TLK is None:
        return None
    shape, model = tuple(experts_TLK.shape[1:]), (config.num_layers, config.moe_router_topk)
    if not config.num_moe_experts or shape != model:
        raise ConfigError(
            f"rollouts.replay_routing: samples with the choices of {shape[0]} layers and {shape[1]} experts of a "
            f"token do not fit this model; they were sampled by another one"
        )
    if not config.sequence_parallel:
        return experts_TLK
    size, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    return experts_TLK.chunk(size)[rank]
