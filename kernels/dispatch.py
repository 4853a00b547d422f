"""Which implementation an op runs: Triton on CUDA tensors (or under Triton's interpreter), plain torch elsewhere."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch


@cache
def triton_available() -> bool:
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
