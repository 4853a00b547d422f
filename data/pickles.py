"""Reads the few pickled files of the public releases (.pt, .pth) as plain data, or refuses them. We write none."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, BinaryIO

from ..core.pickles import load_listed
from .errors import ShardError

PLAIN = (str, int, float, bool, type(None))


def load_release(path: str | Path) -> Any:
    """Tensors, numbers, text, lists and dicts out of a file of torch.save; a file that names any other class is
    refused, unopened.
    """
    import torch

    try:
        with torch.serialization.safe_globals(_numbers()):
            value = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ShardError(
            "refused: it holds more than tensors and plain data, and opening it could run code", shard=str(path)
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise ShardError(f"not readable: {error}", shard=str(path)) from error
    value = _plain_numbers(value)
    _check_plain(value, str(path), torch.Tensor)
    return value


def _numbers() -> list[Any]:
    """What a pickled numpy number names: the function that makes it, under its old and its new module, and its type."""
    import numpy as np
    from numpy._core.multiarray import scalar

    kinds = [type(np.dtype(kind)) for kind in (np.float64, np.float32, np.int64, np.int32, np.bool_)]
    return [(scalar, f"{module}.multiarray.scalar") for module in ("numpy.core", "numpy._core")] + [np.dtype, *kinds]


def _plain_numbers(value: Any) -> Any:
    """The data with numpy numbers converted to Python's; WebRL's stage 2 writes its returns as numpy numbers."""
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(item) for item in value]
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () else value


def _check_plain(value: Any, path: str, tensor: type, where: str = "") -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _check_plain(item, path, tensor, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_plain(item, path, tensor, f"{where}[{i}]")
    elif not isinstance(value, (*PLAIN, tensor)):
        raise ShardError(f"refused: {where or 'it'} is a {type(value).__name__}", shard=path)


_NUMPY = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray")
_ARRAYS = frozenset((module, name) for module in _NUMPY for name in ("ndarray", "dtype", "_reconstruct"))


def load_arrays(stream: BinaryIO, path: str) -> Any:
    """Nested dictionaries of numpy arrays out of the pickle of `path`; one that names any other class is refused."""
    return load_listed(stream, path, _ARRAYS)
