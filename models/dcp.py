"""Reads folders of torch's distributed checkpoints, the format of NeMo's weights, without executing their contents.

torch and megatron-core unpickle `.metadata` and `common.pt` freely. Here `.metadata` may name a short list of plain
classes, tensors are opened with torch's restricted unpickler, and nothing else of the folder is opened.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from ..core.errors import ConfigError, StorageError
from ..core.pickles import load_listed

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_ALLOWED = {
    *(
        (_METADATA, name)
        for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata")
    ),
    *((_METADATA, name) for name in ("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")),
    *((_PLANNER, name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
    ("torch", "Size"),
    *(("torch", name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)),
}


def _mcore_classes() -> dict[tuple[str, str], type]:
    """megatron-core writes classes of its own, whose meaning depends on its version, in place of torch's."""
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan

    module = "megatron.core.dist_checkpointing.strategies.torch"
    return {
        (module, "MCoreMetadata"): type("MCoreMetadata", (Metadata,), {}),
        (module, "MCoreSavePlan"): type("MCoreSavePlan", (SavePlan,), {}),
    }


class DistributedTensors:
    """The tensors of such a folder by name, each read when asked for."""

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.metadata import Metadata

        self.folder, self.described = folder, folder / ".metadata"
        try:
            with open(self.described, "rb") as stream:
                metadata = load_listed(stream, str(self.described), _ALLOWED, _mcore_classes())
        except OSError as error:
            raise ConfigError(f"{self.described}: {error.strerror}; it says which tensors the folder holds") from error
        if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
            raise StorageError(f"{self.described}: is not the description of a distributed checkpoint")
        self._tensors, self._storage = metadata.state_dict_metadata, metadata.storage_data
        self._flattened: dict[str, Any] = getattr(metadata, "mcore_data", None) or {}
        self._bytes = sum(path.stat().st_size for path in folder.iterdir())

    def get(self, name: str) -> torch.Tensor:
        """A whole tensor, put together from its chunks; each must lie within it, and together they must fill it."""
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        meta = self._tensors.get(name)
        if not isinstance(meta, TensorStorageMetadata):
            raise ConfigError(f"{self.folder}: has no tensor '{name}'")
        if self._flattened.get(name):
            raise ConfigError(f"{self.folder}: '{name}' was written flattened, which is not supported")
        try:
            if meta.size.numel() * meta.properties.dtype.itemsize > self._bytes:
                raise StorageError(
                    f"{self.described}: '{name}' has the shape {list(meta.size)}, which is more than the folder holds"
                )
            full = torch.empty(meta.size, dtype=meta.properties.dtype)
            filled = torch.zeros(meta.size, dtype=torch.bool)
            for chunk in meta.chunks:
                place = tuple(
                    slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
                )
                full[place].copy_(self._chunk(name, chunk))
                filled[place] = True
        except StorageError:
            raise
        except Exception as error:  # anything may be wrong in foreign files: types, shapes, offsets
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise StorageError(f"{self.folder}: tensor '{name}' is not readable: {first}") from error
        if not bool(filled.all()):
            raise StorageError(f"{self.described}: the chunks of '{name}' do not fill it")
        return full

    def _chunk(self, name: str, chunk: Any) -> torch.Tensor:
        from torch.distributed.checkpoint.metadata import MetadataIndex

        where = self._storage[MetadataIndex(name, chunk.offsets)]
        path = (self.folder / where.relative_path).resolve()
        if path.parent != self.folder.resolve():
            raise StorageError(
                f"{self.described}: '{name}' is said to lie in {where.relative_path}, outside the folder"
            )
        if getattr(where, "transform_descriptors", None):
            raise StorageError(
                f"{self.described}: '{name}' is stored as {where.transform_descriptors}, which is not supported"
            )
        with open(path, "rb") as stream:
            stream.seek(where.offset)
            held = stream.read(where.length)
        tensor = torch.load(io.BytesIO(held), map_location="cpu", weights_only=True)
        if tuple(tensor.shape) != tuple(chunk.sizes):
            raise StorageError(
                f"{path}: '{name}' has the shape {list(tensor.shape)}, its description says {list(chunk.sizes)}"
            )
        return tensor
