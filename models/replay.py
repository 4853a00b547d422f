"""Routers that take the sampler's choices: a token goes to the experts it went to when it was sampled, and its gates
are computed anew from the trainer's logits for these.

Shape suffixes: T local tokens, L layers, K experts of one token.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer

from ..core.errors import ConfigError


class Replay:
    """What Megatron's router asks for its experts. `given_TK` has -1 for tokens that it routes by itself."""

    def __init__(self) -> None:
        self.given_TK: torch.Tensor | None = None
        self.counts_2: torch.Tensor | None = None  # choices given so far, and those it would not have made

    def get_replay_topk(self, scores_TE: torch.Tensor, topk: int, groups: Any, group_topk: Any, choose: Any):
        """(scores, experts) of every token, under the name that Megatron calls."""
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
    router.router_replay = replay = Replay()
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
