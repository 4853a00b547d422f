"""One token a row from its logits by one given random number, and the token's log-prob.

The choice is the inverse of the cumulative distribution: one number in [0, 1) a row decides it, whatever the batch.
Shape suffixes: B rows, V vocabulary, C chunks of it, K tokens of a chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .dispatch import use_triton

LARGE_VOCAB = 4096
CHUNK = 512  # tokens of a large vocabulary that are summed at once


def inverse_cdf(logp_BV: torch.Tensor, u_B: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative probability passes u; tokens of -inf are never chosen."""
    if logp_BV.shape[-1] >= LARGE_VOCAB:
        return _inverse_cdf_in_chunks(logp_BV, u_B)
    total = logp_BV.double().exp().cumsum(-1)
    target = u_B[:, None] * total[:, -1:]
    index = torch.searchsorted(total, target, right=True).squeeze(1)
    last = (logp_BV > -torch.inf).double().cumsum(-1).argmax(-1)  # rounding must never pick a forbidden last token
    return torch.minimum(index, last)


def _inverse_cdf_in_chunks(logp_BV: torch.Tensor, u_B: torch.Tensor) -> torch.Tensor:
    """The same choice for large vocabularies: the chunk by its sum, then the token within it, without a cumulative
    sum over all.
    """
    rows, vocab = logp_BV.shape
    p_BCK = F.pad(logp_BV, (0, -vocab % CHUNK), value=-torch.inf).exp().view(rows, -1, CHUNK)
    sums_BC = p_BCK.sum(-1, dtype=torch.float64)
    total_BC = sums_BC.cumsum(-1)
    target_B1 = u_B[:, None] * total_BC[:, -1:]
    number_BC = torch.arange(sums_BC.shape[1], device=logp_BV.device)
    # rounding must never pick a forbidden token
    last_B1 = torch.where(sums_BC > 0, number_BC, 0).amax(-1, keepdim=True)
    chosen_B1 = torch.minimum(torch.searchsorted(total_BC, target_B1, right=True), last_B1)
    rest_B1 = target_B1 - (total_BC - sums_BC).gather(1, chosen_B1)
    inner_BK = p_BCK.gather(1, chosen_B1[..., None].expand(-1, -1, CHUNK)).squeeze(1)
    place_BK = torch.arange(CHUNK, device=logp_BV.device)
    last_B1 = torch.where(inner_BK > 0, place_BK, 0).amax(-1, keepdim=True)
    found_B1 = torch.minimum(torch.searchsorted(inner_BK.double().cumsum(-1), rest_B1, right=True), last_B1)
    return (chosen_B1 * CHUNK + found_B1).squeeze(1)


Cuts = tuple[torch.Tensor, torch.Tensor]  # (top_k int64, 0 for all; top_p fp32, 1 for all) of every row


def reference_cut(x_BV: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """The least scaled logit that top-k and then top-p leave in each row; those equal to it stay too."""
    top_k_B, top_p_B = cuts
    ordered_BV = x_BV.sort(-1, descending=True).values
    vocab = x_BV.shape[1]
    last_B1 = torch.where((top_k_B == 0) | (top_k_B > vocab), vocab, top_k_B)[:, None] - 1
    p_BV = ordered_BV.masked_fill(ordered_BV < ordered_BV.gather(1, last_B1), -torch.inf).softmax(-1)
    before_BV = p_BV.cumsum(-1) - p_BV
    # the token that crosses the line stays
    stays_BV = (p_BV > 0) & ((before_BV < top_p_B[:, None]) | (top_p_B[:, None] >= 1))
    return ordered_BV.gather(1, stays_BV.sum(-1, keepdim=True).clamp_min(1) - 1).squeeze(1)


def reference_sample(
    logits_BV: torch.Tensor,
    u_B: torch.Tensor,
    temperature_B: torch.Tensor,
    low_B: torch.Tensor,
    high_B: torch.Tensor,
    cuts: Cuts | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch."""
    wide = torch.float64 if logits_BV.dtype == torch.float64 else torch.float32
    scale_B1 = torch.where(temperature_B == 0, 1.0, temperature_B)[:, None].to(wide)
    logp_BV = torch.log_softmax(logits_BV.to(wide) / scale_B1, -1)
    id_V = torch.arange(logits_BV.shape[1], device=logits_BV.device)
    pick_BV = logp_BV.masked_fill((id_V < low_B[:, None]) | (id_V >= high_B[:, None]), -torch.inf)
    if cuts is not None:
        pick_BV = pick_BV.masked_fill(pick_BV < reference_cut(pick_BV, cuts)[:, None], -torch.inf)
    token_B = torch.where(temperature_B == 0, pick_BV.argmax(-1), inverse_cdf(pick_BV, u_B))
    return token_B, logp_BV.gather(1, token_B[:, None]).squeeze(1).float()


def sample_tokens(
    logits_BV: torch.Tensor,
    u_B: torch.Tensor,
    temperature_B: torch.Tensor,
    low_B: torch.Tensor,
    high_B: torch.Tensor,
    cuts: Cuts | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token int64, log-prob fp32): u_B (fp64) chooses among the ids low <= id < high that `cuts` leaves.

    The log-prob is of the whole vocabulary. Temperature 0 takes the first of the largest logits and reports the
    log-prob at temperature 1. A row with NaN gets a log-prob of NaN.
    """
    if use_triton(logits_BV):
        from .triton.sample import triton_sample

        return triton_sample(logits_BV, u_B, temperature_B, low_B, high_B, cuts)
    return reference_sample(logits_BV, u_B, temperature_B, low_B, high_B, cuts)
