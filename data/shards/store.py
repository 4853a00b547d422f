"""Where shards lie: a local folder, or any fsspec URL when fsspec is installed."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ...core import files
from ...core.errors import ConfigError


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


def view(path: str | Path) -> memoryview:
    """The bytes of a file: mapped when local, fetched whole from a URL."""
    if is_url(path):
        return memoryview(read_bytes(path))
    with open(path, "rb") as stream:
        if os.fstat(stream.fileno()).st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))


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
    descriptor = os.open(Path(path).parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
