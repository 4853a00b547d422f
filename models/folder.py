"""A Hugging Face folder's tensors. Where the folder carries the proof of its export, every tensor and file is held
against it. Pickled files are opened with torch's restricted unpickler and a short allow-list; anything else in them is
refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash

from ..core.checkpoint import file_digest
from ..core.errors import ConfigError, StorageError
from ..core.files import read_json, write_json
from .config import ModelConfig

PROOF = "export_proof.json"
CARRIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
_PROVEN_FILES = (
    "config.json",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    *CARRIED,
)
_REMEDY = f"it was changed since the export was proven; export it again, or remove {PROOF} to take the folder as it is"


class HFFolder:
    """The tensors of a Hugging Face folder, read one at a time; each is checked against the proof where there is
    one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._where: dict[str, Any] = {}
        for name in weight_files(folder):
            handle = _Pickled(folder / name) if name.endswith(".bin") else open_safetensors(folder / name)
            self._where.update(dict.fromkeys(handle.keys(), handle))
        self.proven: dict[str, dict[str, Any]] = check_files(folder).get("tensors", {})
        if self.proven and set(self.proven) != self.names():
            name = sorted(set(self.proven) ^ self.names())[0]
            raise StorageError(f"{folder}: tensor '{name}' is in the weights or in {PROOF}, but not in both; {_REMEDY}")

    def get(self, name: str) -> torch.Tensor:
        """One tensor; one that is not as the proof states it is a StorageError."""
        if name not in self._where:
            raise ConfigError(f"{self.folder}: has no tensor '{name}'")
        tensor = self._where[name].get_tensor(name)
        proven = self.proven.get(name)
        if proven is not None and not same_tensor(tensor, proven):
            raise StorageError(f"{self.folder}: tensor '{name}' is not the proven one; {_REMEDY}")
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not read for it."""
        if name not in self._where:
            raise ConfigError(f"{self.folder}: has no tensor '{name}'")
        return tuple(self._where[name].get_slice(name).get_shape())

    def rows_of(self, name: str, low: int, high: int) -> torch.Tensor:
        """Rows of a tensor; no proof speaks of them alone."""
        return self._where[name].get_slice(name)[low:high]

    def columns_of(self, name: str, low: int, high: int) -> torch.Tensor:
        """Columns of a matrix; likewise."""
        return self._where[name].get_slice(name)[:, low:high]

    def names(self) -> set[str]:
        return set(self._where)


class _Pickled:
    """A pickled file of an older folder with the methods of a safetensors file; it is opened as plain data or
    refused.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ConfigError(f"{path}: missing")
        self.tensors = load_pickle(path)

    def keys(self) -> list[str]:
        return list(self.tensors)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name].contiguous()

    def get_slice(self, name: str) -> _InMemory:
        return _InMemory(self.tensors[name])


class _InMemory:
    """A tensor with the methods of a safetensors slice."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, place: Any) -> torch.Tensor:
        return self.tensor[place].contiguous()


def weight_files(folder: Path) -> list[str]:
    """Names of the weight files of a Hugging Face folder: safetensors, or pickled ones where there are none of them."""
    path, single = folder / "model.safetensors.index.json", "model.safetensors"
    pickled = folder / "pytorch_model.bin.index.json"
    if (
        not path.exists()
        and not (folder / single).exists()
        and (pickled.exists() or (folder / "pytorch_model.bin").exists())
    ):
        path, single = pickled, "pytorch_model.bin"
    index = read_json(path)
    if index is None:
        return [single]
    mapping = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(name, str) for name in mapping.values()):
        raise StorageError(f"{path}: weight_map does not say which file holds which tensor")
    outside = sorted(name for name in mapping.values() if Path(name).name != name)
    if outside:
        raise StorageError(f"{path}: weight_map names '{outside[0]}', which is not a file of this folder")
    return sorted(set(mapping.values()))


def load_pickle(path: Path) -> dict[str, Any]:
    """A state dict from a pickled file: tensors, plain containers and the wrappers of sharded tensors, nothing else."""
    return by_name(unpickle(path), path)


def by_name(state: Any, path: Path) -> dict[str, Any]:
    """What a pickled file held, if it is a mapping of names."""
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise ConfigError(f"{path}: holds a {type(state).__name__}, not tensors by their names")
    return state


def unpickle(path: Path) -> Any:
    """What a pickled file holds, out of the containers of training scripts; torch's restricted unpickler opens it."""
    try:
        with _only_tensors():
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{path}: refused, it is not a plain file of tensors ({first})") from error
    while (
        isinstance(state, dict)
        and len(state) <= 3
        and any(isinstance(state.get(k), dict) for k in ("model", "module", "state_dict"))
    ):
        state = next(state[k] for k in ("model", "module", "state_dict") if isinstance(state.get(k), dict))
    return state


@contextmanager
def _only_tensors() -> Iterator[None]:
    """The types that a pickled file may hold: torch's own, whatever other packages have allowed in this process."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    types: list[Any] = [
        DTensor,
        DTensorSpec,
        TensorMeta,
        Shard,
        Replicate,
        torch.distributed.device_mesh.DeviceMesh,
        torch.Size,
    ]
    try:
        from torch.distributed.tensor.placement_types import _StridedShard

        types.append(_StridedShard)
    except ImportError:
        pass
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(
        [t for t in before if getattr(t, "__module__", "").startswith("torch.")] + types
    )
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def open_safetensors(path: Path) -> Any:
    """A safetensors file, or an error that names it."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ConfigError(f"{path}: missing; the folder must hold safetensors weights")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise StorageError(f"{path}: not a whole safetensors file ({error}); copy or download it again") from error


def check_files(folder: Path) -> dict[str, Any]:
    """The proof of an export ({} where there is none), after its files other than the weights were found as it
    states them.
    """
    proof = read_json(folder / PROOF, {})
    parts: list[Any] = [proof.get(key, {}) for key in ("tensors", "files")] if isinstance(proof, dict) else [None]
    if not all(isinstance(part, dict) for part in parts) or not all(
        isinstance(stated, dict) for stated in parts[0].values()
    ):
        raise StorageError(f"{folder / PROOF}: is not the proof of an export; {_REMEDY}")
    if "xxh3" in proof and seal(proof) != proof["xxh3"]:
        raise StorageError(f"{folder / PROOF}: is not as it was written; {_REMEDY}")
    for name, digest in parts[1].items():
        if name not in _PROVEN_FILES:
            raise StorageError(f"{folder / PROOF}: names '{name}', which no proof covers; {_REMEDY}")
        if not (folder / name).is_file() or file_digest(folder / name) != digest:
            raise StorageError(f"{folder / name}: is not the proven one; {_REMEDY}")
    return proof


def check_left(names: set[str], config: ModelConfig, get: Callable[[str], torch.Tensor], where: Path) -> None:
    """Refuse tensors that would be lost; what a file may hold twice is a tied head, if it is the embedding indeed."""
    if (
        config.tied
        and "lm_head.weight" in names
        and not torch.equal(get("lm_head.weight"), get("model.embed_tokens.weight"))
    ):
        raise ConfigError(
            f"{where}: lm_head.weight differs from the embedding, which tie_word_embeddings says it is;"
            " set tie_word_embeddings to false in config.json, or remove the tensor"
        )
    left = sorted(n for n in names if "rotary" not in n and not (config.tied and n == "lm_head.weight"))
    if left:
        raise ConfigError(f"{where}: the model has no place for tensor '{left[0]}' ({len(left)} such)")


def verify_export(folder: Path) -> dict[str, Any]:
    """The proof of an export, after every byte that it names was read and found as stated; a StorageError
    otherwise.
    """
    if not (folder / PROOF).exists():
        raise ConfigError(f"{folder}: has no {PROOF}; only exports that were proven have one (terrella convert to-hf)")
    if (folder / "adapter_config.json").exists():
        return check_files(folder)
    files = HFFolder(folder)
    if not files.proven:
        raise StorageError(f"{folder / PROOF}: states no tensors; {_REMEDY}")
    for name in sorted(files.names()):
        files.get(name)
    return check_files(folder)


def write_proof(folder: Path, found: dict[str, Any], tensors: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Write and return the proof: what was found of the logits, each tensor, the files beside the weights, and a
    digest of all that.
    """
    files = {name: file_digest(folder / name) for name in _PROVEN_FILES if (folder / name).is_file()}
    proof = {**found, "tensors": tensors, "files": files}
    write_json(folder / PROOF, {**proof, "xxh3": seal(proof)})
    return proof


def seal(proof: dict[str, Any]) -> str:
    """xxh3-128 of a proof, without the field that holds it."""
    return xxhash.xxh3_128(
        json.dumps({k: v for k, v in proof.items() if k != "xxh3"}, sort_keys=True).encode()
    ).hexdigest()


def describe_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """What a proof says of a tensor."""
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "xxh3": tensor_digest(tensor),
    }


def same_tensor(tensor: torch.Tensor, stated: dict[str, Any]) -> bool:
    """Whether a tensor is the one that was stated; proofs of earlier releases state no dtype."""
    return {**describe_tensor(tensor), **({} if "dtype" in stated else {"dtype": None})} == {"dtype": None, **stated}


def tensor_digest(tensor: torch.Tensor) -> str:
    """xxh3-128 of a tensor's bytes."""
    data: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return xxhash.xxh3_128(data).hexdigest()
