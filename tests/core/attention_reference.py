"""Attention over packed documents written out in full."""

from __future__ import annotations

import torch


def full_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    """Causal within the documents that `bounds` cut."""
    document = torch.zeros(bounds[-1], dtype=torch.long)
    for start in bounds[1:-1]:
        document[start:] += 1
    rows = torch.arange(bounds[-1])
    seen = (document[:, None] == document[None, :]) & (rows[None, :] <= rows[:, None])
    repeat = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(repeat, 1)) / q.shape[-1] ** 0.5
    return torch.einsum(
        "hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v.repeat_interleave(repeat, 1)
    )
