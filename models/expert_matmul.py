"""Products of rows that are sorted by expert with each expert's matrix. Shape suffixes: N rows, E experts, K inner
dimension, M columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(
    torch, "_grouped_mm", None
)  # the older name


def can_group(x_NH: torch.Tensor) -> bool:
    """Whether these rows can use grouped products, which exist for bf16 on CUDA."""
    return x_NH.is_cuda and x_NH.dtype == torch.bfloat16 and _grouped_mm is not None


def product(x_NK: torch.Tensor, weight_EKM: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Each expert's rows times its matrix; an expert's rows end at `ends_E`."""
    if not len(x_NK):
        return x_NK.new_empty((0, weight_EKM.shape[-1]))
    return _grouped_mm(x_NK, weight_EKM, offs=ends_E)


def evenly_spaced(weights: Sequence[torch.Tensor]) -> bool:
    """Whether the experts' matrices are equally spaced in one buffer, as an optimizer keeps them."""
    first = weights[0]
    storage = first.untyped_storage().data_ptr()
    step = weights[1].data_ptr() - first.data_ptr() if len(weights) > 1 else 0
    return step > 0 and all(
        w.data_ptr() == first.data_ptr() + i * step and w.is_contiguous() and w.untyped_storage().data_ptr() == storage
        for i, w in enumerate(weights)
    )


def stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """All experts' matrices as one tensor: a view where they are evenly spaced, else a copy."""
    if not evenly_spaced(weights):
        return torch.stack([w.detach() for w in weights])
    first = weights[0].detach()
    step = (weights[1].data_ptr() - first.data_ptr()) // first.element_size()
    return first.as_strided((len(weights), *first.shape), (step, *first.stride()))


def pack_in_place(weights: Sequence[torch.Tensor]) -> None:
    """Move the matrices into one buffer, unless they already share one."""
    if not evenly_spaced(weights):
        for weight, place in zip(weights, torch.stack([w.detach() for w in weights]), strict=True):
            weight.data = place
