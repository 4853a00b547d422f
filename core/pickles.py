"""Pickles of other projects: only classes on a list are ever looked up, so that opening a file cannot run code."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, BinaryIO

from .errors import StorageError


class _Listed(pickle.Unpickler):
    def __init__(
        self, stream: BinaryIO, path: str, allowed: Collection[tuple[str, str]], ours: Mapping[tuple[str, str], type]
    ) -> None:
        super().__init__(stream)
        self.path, self.allowed, self.ours = path, allowed, ours

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.ours:
            return self.ours[module, name]
        if (module, name) not in self.allowed:
            raise StorageError(f"{self.path}: refused: it names {module}.{name}, and opening it could run code")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def load_listed(
    stream: BinaryIO,
    path: str,
    allowed: Collection[tuple[str, str]],
    ours: Mapping[tuple[str, str], type] = MappingProxyType({}),
) -> Any:
    """The object of a pickle that names no other (module, class) than those allowed; any other file is refused
    before it does anything. In place of those in `ours` it gets classes of ours.
    """
    try:
        return _Listed(stream, path, allowed, ours).load()
    except StorageError:
        raise
    except Exception as error:  # a damaged pickle may fail anywhere in the constructors it calls
        raise StorageError(f"{path}: not readable: {type(error).__name__}: {error}") from error
