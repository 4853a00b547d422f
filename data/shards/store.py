"""Where shards lie: a local folder, or any fsspec URL when fsspec is installed. Local files are mapped; of a URL only
the ranges that are asked for are fetched.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from ...core import files
from ...core.errors import ConfigError, StorageError

DEADLINE_S = 600.0  # for one answer of an object store
BLOCK = 8 << 20  # bytes fetched at a time from a URL that is read from end to end


def is_url(path: str | Path) -> bool:
    return "://" in str(path)


def join(folder: str | Path, name: str) -> str:
    return f"{str(folder).rstrip('/')}/{name}"


def base_name(path: str | Path) -> str:
    return str(path).rstrip("/").rsplit("/", 1)[-1]


def _filesystem(path: str | Path) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError as error:
        raise ConfigError(
            f"{path}: reading a URL needs fsspec; install it (pip install fsspec) or copy the shards to a folder"
        ) from error
    return fsspec.core.url_to_fs(str(path))


def make_folder(folder: str | Path) -> None:
    if is_url(folder):
        fs, inner = _filesystem(folder)
        fs.makedirs(inner, exist_ok=True)
    else:
        files.make_folder(Path(folder))


def list_names(folder: str | Path) -> list[str]:
    """Sorted names of the files in a folder; none when it is not there."""
    if is_url(folder):
        fs, inner = _filesystem(folder)
        return sorted(base_name(p) for p in fs.ls(inner, detail=False)) if fs.exists(inner) else []
    return sorted(p.name for p in Path(folder).iterdir() if p.is_file()) if Path(folder).is_dir() else []


def read_bytes(path: str | Path) -> bytes:
    if is_url(path):
        fs, inner = _filesystem(path)
        return fs.cat_file(inner)
    return Path(path).read_bytes()


def read_head(path: str | Path, count: int) -> bytes:
    """The first bytes of a file."""
    if is_url(path):
        fs, inner = _filesystem(path)
        return fs.cat_file(inner, start=0, end=count)
    with open(path, "rb") as stream:
        return stream.read(count)


def exists(path: str | Path) -> bool:
    if is_url(path):
        fs, inner = _filesystem(path)
        return fs.exists(inner)
    return Path(path).exists()


def file_size(path: str | Path) -> int:
    if is_url(path):
        fs, inner = _filesystem(path)
        return int(fs.size(inner))
    return Path(path).stat().st_size


class Ranges:
    """A file behind a URL, as a memoryview would show it: a slice is fetched when it is taken, and nothing is kept but
    the last `ahead` bytes or more.
    """

    def __init__(self, path: str, ahead: int = 0) -> None:
        self.path, self.ahead = path, ahead
        try:
            self.size = file_size(path)
        except Exception as error:  # every store has errors of its own
            raise StorageError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error
        self._start, self._held = 0, memoryview(b"")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> memoryview:
        start, stop, _ = part.indices(self.size)
        if stop <= start:
            return memoryview(b"")
        if not self._start <= start <= stop <= self._start + len(self._held):
            fetched = read_ranges([(self.path, start, min(max(stop, start + self.ahead), self.size))])[0]
            if not self.ahead:
                return fetched
            self._start, self._held = start, fetched
        return self._held[start - self._start : stop - self._start]


Bytes = memoryview | Ranges


def read_ranges(wanted: Sequence[tuple[str, int, int]]) -> list[memoryview]:
    """The bytes from start to stop of each (URL, start, stop), asked for at the same time where the store can."""
    fs, _ = _filesystem(wanted[0][0])
    inner = {path: _filesystem(path)[1] for path in {path for path, _, _ in wanted}}
    paths = [inner[path] for path, _, _ in wanted]
    starts, stops = [start for _, start, _ in wanted], [stop for _, _, stop in wanted]
    limit = {"timeout": DEADLINE_S} if fs.async_impl else {}
    try:
        found = fs.cat_ranges(paths, starts, stops, on_error="raise", **limit)
    except Exception as error:  # every store has errors of its own
        raise StorageError(f"{wanted[0][0]}: cannot be read: {type(error).__name__}: {error}") from error
    for (path, start, stop), data in zip(wanted, found, strict=True):
        if len(data) != stop - start:
            raise StorageError(
                f"{path}: asked for the bytes {start} to {stop}, got {len(data)}; its server must answer range "
                "requests: copy the shards to a folder or an object store"
            )
    return [memoryview(data) for data in found]


def view(path: str | Path, ahead: int = 0) -> Bytes:
    """The bytes of a file: mapped when local; of a URL every slice is a request, for at least `ahead` bytes."""
    if is_url(path):
        return Ranges(str(path), ahead)
    with open(path, "rb") as stream:
        if os.fstat(stream.fileno()).st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))


def checksum(data: Bytes) -> str:
    """xxh3 of all bytes; a file behind a URL passes through in blocks."""
    digest = xxhash.xxh3_64()
    for at in range(0, len(data), BLOCK):
        digest.update(data[at : at + BLOCK])
    return digest.hexdigest()


def commit(temporary: Path, path: str | Path) -> None:
    """Move a finished local file to its place in one step; to a URL it is uploaded (object stores show it only when
    whole).
    """
    with open(temporary, "rb") as stream:
        os.fsync(stream.fileno())
    if is_url(path):
        fs, inner = _filesystem(path)
        fs.put_file(str(temporary), inner)
        temporary.unlink()
        return
    if temporary.parent == Path(path).parent:
        os.replace(temporary, path)
    else:
        near = Path(path).with_name(f".{base_name(path)}.{os.getpid()}.tmp")
        shutil.copyfile(temporary, near)
        temporary.unlink()
        os.replace(near, path)
    files.sync_folder(Path(path).parent)


def write_bytes(path: str | Path, data: bytes) -> None:
    """Replace a small file in one step."""
    with tempfile.TemporaryDirectory() as scratch:
        temporary = Path(scratch) / base_name(path)
        temporary.write_bytes(data)
        commit(temporary, path)


def remove(path: str | Path) -> None:
    if is_url(path):
        fs, inner = _filesystem(path)
        fs.rm_file(inner)
    else:
        Path(path).unlink(missing_ok=True)
