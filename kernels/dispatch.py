"""Which implementation an op runs: Triton on CUDA tensors (or under Triton's interpreter), plain torch elsewhere."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. On the host Triton's own goes through twenty calls, and a small model's step waits for the
    host.
    """
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n; 1 for nothing."""
    return 1 << max(0, n - 1).bit_length()


@cache
def triton_available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Triton's CPU interpreter is on: the tests run the kernels on CPU tensors that way."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(tensor: torch.Tensor) -> bool:
    """CUDA tensors need Triton; a missing install is an error rather than a silent fall to the slow path."""
    if tensor.dtype == torch.float64:
        return False
    if tensor.is_cuda and not triton_available():
        raise RuntimeError("kernels on CUDA tensors need triton: pip install triton")
    return tensor.is_cuda or (interpreting() and triton_available())
