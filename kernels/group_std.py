"""What divides the advantages of groups: a floor for their std, and their mean std over all ranks.

Shape suffixes: G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

EPS = 1e-6  # added to a group's std


def mean_group_std(std_G: torch.Tensor, measured_G: torch.Tensor, gather: Callable[[Any], list[Any]]) -> float:
    """The mean std over all ranks' groups that have one; 1 where none has."""
    parts = gather((float(std_G[measured_G].sum()), int(measured_G.sum())))
    groups = sum(count for _, count in parts)
    return sum(total for total, _ in parts) / groups if groups else 1.0
