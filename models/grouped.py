"""Products of rows that are sorted by expert with each expert's matrix. Shape suffixes: N rows, E experts, K inner
dimension, M columns.
"""

from __future__ import annotations

from typing import Any

import torch

_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(
    torch, "_grouped_mm", None
)  # the older name


def can_group(x_NH: torch.Tensor) -> bool:
    """Whether these rows go through grouped products: they are made for bf16 on CUDA."""
    return x_NH.is_cuda and x_NH.dtype == torch.bfloat16 and _grouped_mm is not None


def product(x_NK: torch.Tensor, weight_EKM: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Each expert's rows times its matrix; an expert's rows end at `ends_E`."""
    if not len(x_NK):
        return x_NK.new_empty((0, weight_EKM.shape[-1]))
    return _grouped_mm(x_NK, weight_EKM, offs=ends_E)
