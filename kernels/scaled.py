"""The form of a matrix in fp8 (e4m3: three bits of mantissa): one fp32 scale for each row.

Shape suffixes: N rows, K columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST = 2.0**-100  # of a row's largest magnitude: rows of zeros must not be divided by zero


@dataclass(frozen=True)
class Scaled:
    """Row n stands for data[n] * scale[n]."""

    data_NK: torch.Tensor
    scale_N: torch.Tensor

    def wide(self) -> torch.Tensor:
        """In fp32."""
        return self.data_NK.float() * self.scale_N[:, None]

    def part(self, rows: slice) -> Scaled:
        """Some of the rows, in the same memory."""
        return Scaled(self.data_NK[rows], self.scale_N[rows])


def empty_scaled(rows: int, columns: int, device: torch.device) -> Scaled:
    """Memory for a matrix."""
    return Scaled(
        torch.empty((rows, columns), dtype=FP8, device=device), torch.empty(rows, dtype=torch.float32, device=device)
    )
