"""A mode in which a row's result does not depend on the rows that came with it, so that sampler and trainer agree to
the last bit.

Libraries choose a matrix product's tiling, and so its order of summation, by the number of rows. Under
`batch_invariant()` every product of two matrices takes one fixed tile and runs through the inner dimension in one
order; attention (models/attention.py, models/paged_decode.py) goes row by row. Norm, rotation, gate and log-prob
kernels work a row at a time anyway.

Shape suffixes: M rows, K inner dimension, N columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .dispatch import use_triton

_active: ContextVar[bool] = ContextVar("batch_invariant", default=False)
_aten = torch.ops.aten
_OTHER_PRODUCTS = {
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}


def is_batch_invariant() -> bool:
    """Whether the mode is on."""
    return _active.get()


def reference_matmul(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """Plain torch, one row at a time."""
    return torch.stack([b_KN.T @ row_K for row_K in a_MK]) if len(a_MK) else a_MK.new_zeros((0, b_KN.shape[1]))


def matmul(a_MK: torch.Tensor, b_KN: torch.Tensor, out_MN: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b, each row of it the same bits whatever M is."""
    if use_triton(a_MK):
        from .triton.batch_invariant import triton_matmul

        return triton_matmul(a_MK, b_KN, out_MN)
    product_MN = reference_matmul(a_MK, b_KN)
    return product_MN if out_MN is None else out_MN.copy_(product_MN)


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.mm.default:
            return matmul(args[0], args[1])
        if func is _aten.mm.out:
            return matmul(args[0], args[1], kwargs["out"])
        if func is _aten.addmm.default and not kwargs:
            return matmul(args[1], args[2]) + args[0]
        if func in _OTHER_PRODUCTS and args[0].is_cuda:  # the CPU's references go row by row with them
            raise RuntimeError(
                f"batch_invariant: {func} has no invariant form; the model must run in our layers (precision.layers: "
                "ours)"
            )
        return func(*args, **kwargs)


@contextmanager
def batch_invariant(on: bool = True) -> Iterator[None]:
    """Run what is inside row by row in the sense above; `on=False` changes nothing. Forward passes only: slower, and
    not for training.
    """
    if not on:
        yield
        return
    token = _active.set(True)
    try:
        with _Mode():
            yield
    finally:
        _active.reset(token)
