"""Value heads on the hidden states of the last pipeline stage. They are replicated over tensor ranks.

Shape suffixes: T tokens, H hidden.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

ValueHead = Literal["none", "scalar", "twin"]


class ScalarHead(nn.Module):
    """One value per token: (T, H) to (T)."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, 1, dtype=dtype)

    def forward(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden_TH).squeeze(-1).float()


class TwinHeads(nn.Module):
    """WebRL's critic: two independent classifiers of success, (T, H) to logits (T, 2 heads, 2 classes)."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(
                nn.Linear(hidden, hidden, dtype=dtype),
                nn.ReLU(),
                nn.Linear(hidden, hidden, dtype=dtype),
                nn.ReLU(),
                nn.Linear(hidden, 2, dtype=dtype),
            )
            for _ in range(2)
        )

    def forward(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        return torch.stack([head(hidden_TH) for head in self.heads], 1).float()


def twin_value(logits: torch.Tensor) -> torch.Tensor:
    """The smaller of the two heads' probabilities of success, from logits (..., 2 heads, 2 classes)."""
    return logits.softmax(-1)[..., 1].min(-1).values


def make_head(kind: ValueHead, hidden: int, dtype: torch.dtype) -> nn.Module | None:
    """The module of a kind of value head."""
    if kind == "none":
        return None
    return ScalarHead(hidden, dtype) if kind == "scalar" else TwinHeads(hidden, dtype)
