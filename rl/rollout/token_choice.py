"""Samples a token per row, for every setting: plain torch on any device. Log-probs are of the untruncated and
unpenalised distribution.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch

from ...core.rng import uniform_tensor
from ...kernels.sample import inverse_cdf
from .sampler import SamplingParams


def plain(params: SamplingParams) -> bool:
    """Whether the sampling kernel supports these settings; it has no penalties, which need the tokens so far."""
    return params.repetition_penalty == 1.0


def choose(
    logits_BV: torch.Tensor,
    keys_B: torch.Tensor,
    step: int,
    params: SamplingParams,
    seen_BV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick a token per row by its key's random number for this step."""
    return choose_rows(logits_BV, uniform_tensor(keys_B, torch.full_like(keys_B, step)), params, seen_BV)


def choose_rows(
    logits_BV: torch.Tensor, u_B: torch.Tensor, params: SamplingParams, seen_BV: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token, log-prob) of every row by its number in [0, 1); `seen_BV` marks the tokens a penalty is for."""
    scale = params.temperature or 1.0
    logp_BV = torch.log_softmax(logits_BV.float() / scale if scale != 1.0 else logits_BV.float(), -1)
    pick_BV = logp_BV
    if seen_BV is not None:
        penalty = params.repetition_penalty
        punished_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
        pick_BV = torch.log_softmax(torch.where(seen_BV, punished_BV, logits_BV).float() / scale, -1)
    if params.allowed is not None:
        low, high = params.allowed
        whole_BV, pick_BV = pick_BV, torch.full_like(pick_BV, -torch.inf)
        pick_BV[:, low:high] = whole_BV[:, low:high]
    token_B = pick_BV.argmax(-1) if params.temperature == 0 else inverse_cdf(_truncate(pick_BV, params), u_B)
    return token_B, logp_BV.gather(1, token_B[:, None]).squeeze(1)


def _truncate(logp_BV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    if params.top_k and params.top_k < logp_BV.shape[-1]:
        floor = logp_BV.topk(params.top_k, -1).values[:, -1:]
        logp_BV = logp_BV.masked_fill(logp_BV < floor, -torch.inf)
    if params.top_p < 1.0:
        ordered, order = logp_BV.softmax(-1).sort(-1, descending=True)
        drop = ordered.cumsum(-1) - ordered >= params.top_p  # the token that crosses the threshold is kept
        logp_BV = logp_BV.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)
    return logp_BV
