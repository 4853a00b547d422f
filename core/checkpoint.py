"""Checkpoints: every rank writes its own part of the parameters, by global name, into files that it also hashes.

    step_00000020/
      manifest.json            written last: layout, model, step, size and xxh3-128 of every other file, and its own
                               digest
      shard_00000.safetensors  runs [start, end) of flattened tensor-parallel parts, listed in the header
      moments_00000.safetensors  the same for the optimizer's moments, which `drop_moments` deletes
      extra.json               what the caller gave: data position, journal, curriculum

The folder is built under a hidden name and renamed when complete, so a kill leaves the old checkpoint or the new one.
Reading needs no process group (`CheckpointReader`), whatever layout wrote the checkpoint.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .background import Background, wait_for_all
from .config import LAYOUT, ParallelConfig, PrecisionConfig
from .errors import ConfigError, StorageError, TerrellaError
from .files import (
    file_digest,
    json_digest,
    make_folder,
    read_json,
    save_tensors,
    storage_errors,
    sync_files,
    sync_folder,
    write_json,
)
from .mcore.params import Shard

FORMAT = 2  # format 1 had no digest of the manifest; it can still be read
MANIFEST = "manifest.json"
WEIGHTS, MOMENTS = "shard", "moments"  # prefixes of a rank's files
WAIT_SECONDS = 1800.0  # for the slowest rank's files
log = logging.getLogger("terrella")


def manifest_digest(manifest: dict[str, Any]) -> str:
    """xxh3-128 of a manifest without its own `digest`."""
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return json_digest(content)


@dataclass(frozen=True)
class Entry:
    """One stored tensor: a run, from `start` on, of a flattened shard of a parameter or of its optimizer state."""

    name: str
    kind: str  # param (what the model computes with), master, exp_avg, exp_avg_sq
    shape: tuple[int, ...]  # of the part
    shard: Shard
    start: int


class Checkpointed(Protocol):
    """What a checkpoint needs of an `Engine`."""

    optimizer: Any  # None in an engine that only scores
    parallel: ParallelConfig
    precision: PrecisionConfig
    groups: Any
    build: Any
    steps: int
    writer: Any  # writes a checkpoint in the background

    def local_parameters(self) -> list[Any]: ...

    def load_weights(self, source: Callable[[str], torch.Tensor | Stored | None]) -> None: ...


def _collect(engine: Checkpointed) -> tuple[dict[str, torch.Tensor], list[Entry]]:
    """This rank's tensors, copied to host memory; of replicas, one rank stores each."""
    from .mcore import optimizer as adam

    tensors: dict[str, torch.Tensor] = {}
    entries: list[Entry] = []
    named = {id(p.param): p for p in engine.local_parameters()}
    first_of_tensor = engine.groups.tensor_rank == 0

    def put(p, kind: str, start: int, value: torch.Tensor) -> None:
        if p.tied_copy or (p.shard.dim is None and not p.expert and not first_of_tensor):
            return
        tensors[str(len(entries))] = value.detach().reshape(-1).to("cpu", copy=True)
        entries.append(Entry(p.name, kind, tuple(p.param.shape), p.shard, start))

    optimized = set()
    if engine.optimizer is not None:
        for part in adam.state_parts(engine.optimizer):
            p = named[id(part.param)]
            put(p, "master", part.start, part.master)
            for name in adam.MOMENTS:
                if name in part.state:
                    put(p, name, part.start, part.state[name])
        optimized = {id(p.param) for p in named.values() if p.param.requires_grad}
    for key, p in named.items():
        replica = engine.groups.expert_replica_rank if p.expert else engine.groups.replica_rank
        if key not in optimized and replica == 0:
            put(p, "param", 0, p.param)
    return tensors, entries


class _Writer(Background):
    """Writes this rank's files from a copy in host memory, 12 bytes for each trained parameter of its share, which it
    holds until they are on disk. Uses no collectives: a rank that fails must not block the others.
    """

    def __init__(
        self, folder: Path, final: Path, tensors: dict, entries: list[Entry], manifest: dict[str, Any]
    ) -> None:
        super().__init__(f"{folder}: the checkpoint", partial(_write_files, folder, tensors, entries))
        self.folder, self.final, self.manifest = folder, final, manifest


def _write_files(folder: Path, tensors: dict[str, torch.Tensor], entries: list[Entry]) -> dict[str, Any]:
    """Write this rank's tensors; weights and moments go to separate files."""
    from .mcore import optimizer as adam

    files: dict[str, Any] = {}
    states = {key: value for key, value in tensors.items() if not key.isdigit()}  # of random generators
    for prefix, extra in ((WEIGHTS, states), (MOMENTS, {})):
        chosen = [i for i, entry in enumerate(entries) if (entry.kind in adam.MOMENTS) == (prefix == MOMENTS)]
        if chosen or extra:
            held = {str(key): tensors[str(i)] for key, i in enumerate(chosen)}
            files |= write_shard(folder, dist.get_rank(), held | extra, [entries[i] for i in chosen], prefix)
    return files


def write_shard(
    folder: Path, number: int, tensors: dict[str, torch.Tensor], entries: list[Entry], prefix: str = WEIGHTS
) -> dict[str, Any]:
    """Write one file of tensors and flush it to disk; returns {file name: size and digest} for the manifest."""
    path = folder / f"{prefix}_{number:05d}.safetensors"
    save_tensors(path, tensors, {"entries": json.dumps([asdict(e) for e in entries])})
    sync_files(path)
    return {path.name: {"bytes": path.stat().st_size, "xxh3": file_digest(path)}}


def seal(folder: Path, manifest: dict[str, Any], shards: Sequence[dict[str, Any]]) -> None:
    """Write the manifest, from what `write_shard` returned for every shard, once all are on disk."""
    files: dict[str, Any] = {name: file for shard in shards for name, file in shard.items()}
    extra = folder / "extra.json"
    files["extra.json"] = {"bytes": extra.stat().st_size, "xxh3": file_digest(extra)}
    _write_manifest(folder, {"format": FORMAT, **manifest, "files": files})


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    content = json.loads(json.dumps(manifest))  # as it will be read: tuples are lists
    write_json(folder / MANIFEST, {**content, "digest": manifest_digest(content)})


def has_moments(path: Path) -> bool:
    """Whether a checkpoint holds the optimizer's state, without which training cannot continue."""
    return bool(_read_manifest(path / MANIFEST).get("optimizer"))


def drop_moments(path: Path) -> None:
    """Delete the optimizer's state of a checkpoint and keep its weights. The manifest is rewritten first, so that a
    kill leaves a valid checkpoint. Earlier releases wrote both to the same files; those checkpoints stay as they are.
    """
    manifest = _read_manifest(path / MANIFEST)
    dropped = [name for name in manifest["files"] if name.startswith(MOMENTS)]
    if dropped:
        left = {name: file for name, file in manifest["files"].items() if name not in dropped}
        kept = {key: value for key, value in manifest.items() if key != "digest"}
        _write_manifest(path, {**kept, "optimizer": False, "files": left})
        sync_folder(path)
    if dropped or not manifest.get("optimizer"):
        with storage_errors(path):
            for file in path.glob(f"{MOMENTS}_*.safetensors"):
                file.unlink()


def publish(folder: Path, final: Path, manifest: dict[str, Any], shards: Sequence[dict[str, Any]]) -> None:
    """Write the manifest, and rename the folder to its final name."""
    seal(folder, manifest, shards)
    with storage_errors(final):
        sync_folder(folder)
        replaced = final.with_name(f".replaced-{final.name}")
        if final.exists():
            discard(replaced)
            os.rename(final, replaced)
        os.rename(folder, final)
        sync_folder(final.parent)
        discard(replaced)


def discard(folder: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a kill midway leaves nothing that looks like one."""
    if folder.exists():
        hidden = folder.with_name(f".deleting-{uuid.uuid4().hex[:8]}")
        os.rename(folder, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _agree(error: BaseException | None, value: Any = None) -> list[Any]:
    """Every rank's value; raises on all ranks if any had an error, so that none continues alone. Collective."""
    per_rank: list = [None] * dist.get_world_size()
    dist.all_gather_object(per_rank, (None if error is None else f"rank {dist.get_rank()}: {error}", value))
    if error is not None and isinstance(error, TerrellaError):
        raise error
    messages = [message for message, _ in per_rank if message]
    if messages:
        raise StorageError("; ".join(messages)) from error
    return [value for _, value in per_rank]


def save(engine: Checkpointed, path: Path, extra: dict[str, Any], wait: bool) -> None:
    """See `Engine.save`."""
    from .mcore import optimizer as adam
    from .mcore import setup

    finish(engine)
    rank = dist.get_rank()
    token = [uuid.uuid4().hex[:8] if rank == 0 else None]
    dist.broadcast_object_list(token, src=0)
    folder = path.with_name(f".saving-{path.name}-{token[0]}")
    error = None
    if rank == 0:
        try:
            make_folder(folder)
            write_json(folder / "extra.json", extra)
        except TerrellaError as problem:
            error = problem
    _agree(error)
    tensors, entries = _collect(engine)
    tensors.update(setup.generator_states())
    manifest = {
        "step": engine.steps,
        "updates": adam.update_count(engine.optimizer) if engine.optimizer is not None else 0,
        "optimizer": engine.optimizer is not None,
        "precision": engine.precision.params,
        "parallel": asdict(engine.parallel),
        "world": dist.get_world_size(),
        "model": engine.build.describe(),
    }
    engine.writer = _Writer(folder, path, tensors, entries, manifest)
    engine.writer.start()
    if wait:
        finish(engine)


def finish(engine: Checkpointed) -> None:
    """Wait for the background writer of every rank; rank 0 then publishes the folder, or deletes it if any failed."""
    writer = engine.writer
    if writer is None:
        return
    problem = wait_for_all(writer, lambda writes: any(_agree(None, writes)), WAIT_SECONDS)
    engine.writer = None
    try:
        shards = _agree(problem, writer.value)
        error = None
        if dist.get_rank() == 0:
            try:
                publish(writer.folder, writer.final, writer.manifest, shards)
            except Exception as problem:
                error = problem
        _agree(error)
    except TerrellaError:
        if dist.get_rank() == 0:
            shutil.rmtree(writer.folder, ignore_errors=True)
        raise


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint, of which a rank reads only its own part."""

    reader: CheckpointReader
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.reader.shape(self.name)

    def cut(self, shard: Shard) -> torch.Tensor:
        """The part that `shard` names."""
        return self.reader.cut(self.name, "param", shard)


class CheckpointReader:
    """A checkpoint's tensors, whole or in parts, one at a time; needs no process group."""

    def __init__(self, path: Path, verify: bool = True) -> None:
        self.path = path
        self.bytes_read = 0  # of tensors, so far
        if not (path / MANIFEST).exists():
            aside = path.with_name(f".replaced-{path.name}")
            if not (aside / MANIFEST).exists():
                if any(path.glob("shard_*.safetensors")):
                    raise StorageError(f"{path}: damaged, its {MANIFEST} is missing")
                raise ConfigError(f"{path}: not a checkpoint (it has no {MANIFEST})")
            self.path = aside  # killed between the two renames of a replacement
        self.manifest = _read_manifest(self.path / MANIFEST)
        self._open: dict[str, Any] = {}
        self._index: dict[tuple[str, str], list[tuple[Entry, str, str]]] | None = None
        if verify:
            self.verify(self.manifest["files"])

    def verify(self, names: Iterable[str]) -> None:
        """Check the size and digest of files; the error names a damaged one."""
        for name in names:
            expected = self.manifest["files"][name]
            path = self.path / name
            if not path.exists():
                raise StorageError(f"{path}: missing from the checkpoint")
            if path.stat().st_size != expected["bytes"] or file_digest(path) != expected["xxh3"]:
                raise StorageError(f"{path}: damaged, its bytes do not match the checkpoint's manifest")

    def _file(self, name: str) -> Any:
        from safetensors import safe_open

        if name not in self._open:
            self._open[name] = safe_open(self.path / name, framework="pt")
        return self._open[name]

    @property
    def index(self) -> dict[tuple[str, str], list[tuple[Entry, str, str]]]:
        """(name, kind) to the stored runs: entry, file and key."""
        if self._index is None:
            self._index = {}
            for name in self.manifest["files"]:
                if name.endswith(".safetensors"):
                    for key, raw in enumerate(json.loads(self._file(name).metadata()["entries"])):
                        entry = Entry(
                            raw["name"], raw["kind"], tuple(raw["shape"]), Shard(**raw["shard"]), raw["start"]
                        )
                        self._index.setdefault((entry.name, entry.kind), []).append((entry, name, str(key)))
        return self._index

    def names(self) -> list[str]:
        """Global names of all parameters."""
        return sorted({name for name, _ in self.index})

    def _runs(self, name: str, kind: str) -> list[tuple[Entry, str, str]]:
        """Where a tensor is stored. For kind `param` that is the fp32 master weight where there is one."""
        runs = self.index.get((name, kind)) or (self.index.get((name, "master")) if kind == "param" else None)
        if not runs:
            raise ConfigError(f"{self.path}: has no tensor '{name}' ({kind})")
        return runs

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole parameter, from the index alone."""
        entry = self._runs(name, "param")[0][0]
        return entry.shard.full_shape(entry.shape)

    def full(self, name: str, kind: str = "param") -> torch.Tensor:
        """A whole tensor."""
        runs = self._runs(name, kind)
        shard, shape = runs[0][0].shard, runs[0][0].shape
        return shard.join([self._read(runs, rank, 0, math.prod(shape)).view(shape) for rank in range(shard.size)])

    def part(self, name: str, kind: str, shard: Shard, start: int, end: int) -> torch.Tensor:
        """The run [start, end) of the flattened part that `shard` names, of any layout."""
        runs = self._runs(name, kind)
        if runs[0][0].shard.size == shard.size:
            return self._read(runs, shard.rank, start, end)
        return self.cut(name, kind, shard).reshape(-1)[start:end]

    def cut(self, name: str, kind: str, shard: Shard) -> torch.Tensor:
        """The part that `shard` names, of any layout. If the stored parts have another size, those that overlap are
        read: only the needed rows, or whole parts where they are cut along columns.
        """
        runs = self._runs(name, kind)
        shape, stored = runs[0][0].shape, runs[0][0].shard
        if stored.size == shard.size:
            return self._read(runs, shard.rank, 0, math.prod(shape)).view(shape)
        dim = stored.dim if stored.dim is not None else shard.dim
        assert dim is not None
        each = shape[dim] // stored.halves  # size of a half of a stored part
        wanted = each * stored.size // shard.size
        first, last = shard.rank * wanted, (shard.rank + 1) * wanted
        pieces = []
        for half in range(stored.halves):
            for rank in range(first // each, -(-last // each)):
                low, high = max(first - rank * each, 0), min(last - rank * each, each)
                pieces.append(self._narrow(runs, rank, dim, half * each + low, half * each + high))
        return torch.cat(pieces, dim)

    def _narrow(self, runs: list[tuple[Entry, str, str]], rank: int, dim: int, low: int, high: int) -> torch.Tensor:
        shape = runs[0][0].shape
        if dim == 0:
            inner = math.prod(shape[1:])
            return self._read(runs, rank, low * inner, high * inner).view(-1, *shape[1:])
        return self._read(runs, rank, 0, math.prod(shape)).view(shape).narrow(dim, low, high - low)

    def _read(self, runs: list[tuple[Entry, str, str]], rank: int, start: int, end: int) -> torch.Tensor:
        """Elements [start, end) of a stored part, from the runs that hold them."""
        pieces = []
        for entry, file, key in sorted((r for r in runs if r[0].shard.rank == rank), key=lambda r: r[0].start):
            stored = self._file(file).get_slice(key)
            low, high = max(start - entry.start, 0), min(end - entry.start, stored.get_shape()[0])
            if low < high:
                pieces.append(stored[low:high])
                self.bytes_read += pieces[-1].numel() * pieces[-1].element_size()
        return torch.cat(pieces) if len(pieces) != 1 else pieces[0]

    def generators(self, rank: int) -> dict[str, torch.Tensor]:
        """The states of random generators that a rank saved."""
        file = self._file(f"shard_{rank:05d}.safetensors")
        return {key: file.get_tensor(key) for key in file.keys() if key.startswith("rng.")}

    @property
    def extra(self) -> dict[str, Any]:
        return read_json(self.path / "extra.json")


def _read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest and check its digest; format 1 has none."""
    manifest = read_json(path)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise StorageError(f"{path}: damaged, it does not list the checkpoint's files")
    if "digest" in manifest:
        if manifest["digest"] != manifest_digest(manifest):
            raise StorageError(f"{path}: damaged, its content does not match its own digest")
        if manifest.get("format") == FORMAT:
            return manifest
    elif manifest.get("format") == 1:
        log.warning(
            "%s: written by a release that kept no digest of it; the other files are checked, this one cannot be",
            path,
        )
        return manifest
    elif manifest.get("format") == FORMAT:
        raise StorageError(f"{path}: damaged, it has no digest")
    raise ConfigError(f"{path.parent}: checkpoint format {manifest.get('format')}, this version reads 1 and {FORMAT}")


def open_verified(path: Path) -> CheckpointReader:
    """A reader of a verified checkpoint; the ranks share the work of checking its files. Collective."""
    reader, error = None, None
    try:
        reader = CheckpointReader(path, verify=False)
        reader.verify(sorted(reader.manifest["files"])[dist.get_rank() :: dist.get_world_size()])
    except Exception as problem:
        error = problem
    _agree(error)
    assert reader is not None
    return reader


def load(engine: Checkpointed, path: Path, weights_only: bool) -> dict[str, Any]:
    """See `Engine.load`."""
    from .mcore import optimizer as adam
    from .mcore import setup

    finish(engine)
    rank, world = dist.get_rank(), dist.get_world_size()
    reader = open_verified(path)
    manifest = reader.manifest
    resumes = not weights_only and engine.optimizer is not None and manifest["optimizer"]
    # trained parameters come with the optimizer's state below: each data rank reads its share, and gathers the rest
    shared = {p.name for p in engine.local_parameters() if resumes and p.param.requires_grad}
    engine.load_weights(lambda name: None if name in shared else Stored(reader, name))
    if not resumes:
        return reader.extra
    named = {id(p.param): p for p in engine.local_parameters()}
    for p in named.values():
        p.require_shape(reader.shape(p.name))
    for part in adam.state_parts(engine.optimizer):
        p = named[id(part.param)]
        kinds = ("master", *adam.MOMENTS) if manifest["updates"] else ("master",)
        read = {kind: reader.part(p.name, kind, p.shard, part.start, part.end) for kind in kinds}
        adam.set_state(engine.optimizer, part, read.pop("master"), read, manifest["updates"])
    adam.publish_masters(engine.optimizer)
    engine.steps = manifest["step"]
    if manifest["world"] == world and all(
        manifest["parallel"].get(key) == getattr(engine.parallel, key) for key in LAYOUT
    ):
        setup.restore_generators(reader.generators(rank))
    return reader.extra
