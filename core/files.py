"""Files that are complete or absent: atomic writes, and operating-system errors as messages with a remedy."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from .errors import ConfigError, StorageError

_UMASK = os.umask(0o077)  # can only be read by setting it
os.umask(_UMASK)

_REMEDY = {
    errno.ENOSPC: "the disk is full; free space or choose another --run folder, then run the same command again",
    errno.EDQUOT: (
        "the disk quota is used up; free space or choose another --run folder, then run the same command again"
    ),
    errno.EACCES: "no permission; choose a --run folder you may write to",
    errno.EPERM: "no permission; choose a --run folder you may write to",
    errno.EROFS: "the file system is read-only; choose another --run folder",
    errno.ENOTDIR: "a part of this path is a file, not a folder; choose another --run folder",
    errno.ENAMETOOLONG: "the path is too long; choose a shorter --run folder",
}


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an OSError about `path` into a StorageError that says what to do."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDY.get(error.errno or 0, "check the path and the file system")
        raise StorageError(f"{error.filename or path}: {error.strerror or error}: {remedy}") from error


def make_folder(path: Path) -> Path:
    """Create a folder and its parents; a failure is a StorageError that says why."""
    with storage_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step: a reader, or a kill, sees the old file or the new one."""
    # hosts that share the folder have equal process ids
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    with storage_errors(path):
        try:
            with open(temporary, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to disk: without it a power cut may take back a file that was renamed."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_files(path: Path) -> None:
    """Force a finished file, or all files of a folder, to disk, and set their permissions by the umask: safetensors
    writes through temporary files that only their owner may read.
    """
    with storage_errors(path):
        for file in [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]:
            os.chmod(file, 0o666 & ~_UMASK)
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())
        for folder in [path, *(p for p in path.rglob("*") if p.is_dir())] if path.is_dir() else [path.parent]:
            sync_folder(folder)


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to write that is renamed to `out`, all of it on disk, when the block ends; a block that fails leaves
    nothing behind.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: is not empty; choose another folder")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a start that was killed
    try:
        yield make_folder(partial)
        sync_files(partial)
        with storage_errors(out):
            os.replace(partial, out)  # an empty folder may be there
            sync_folder(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def save_tensors(path: Path, tensors: Mapping[str, Any], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file; a full disk is reported like any other file system error."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with storage_errors(path):
        try:
            save_file(dict(tensors), path, metadata)
        except SafetensorError as error:  # what safetensors raises for a full disk
            raise StorageError(
                f"{path}: {error}: free space or choose another folder, then run the same command again"
            ) from error


def load_tensors(path: Path) -> dict[str, Any]:
    """All tensors of a safetensors file; a damaged or truncated one is a StorageError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with storage_errors(path):
        try:
            return load_file(path)
        except SafetensorError as error:
            raise StorageError(
                f"{path}: not a whole safetensors file ({error}); restore it from where it came"
            ) from error


def file_digest(path: Path) -> str:
    """xxh3-128 of a file's bytes."""
    digest = xxhash.xxh3_128()
    with storage_errors(path), open(path, "rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def json_digest(value: Any) -> str:
    """xxh3-128 of a JSON value, whatever the order of its keys."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_atomic(path, json.dumps(value, indent=1, sort_keys=False, ensure_ascii=False) + "\n")


def read_json(path: Path, default: Any = None) -> Any:
    """Read a JSON file; `default` when it is not there. A file that is not JSON is a StorageError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return default
    except (ValueError, RecursionError) as error:  # also for huge numbers and deep nesting
        raise StorageError(f"{path}: not a JSON file ({error}); move it away and run the same command again") from error


def parse_json(text: str, **options: Any) -> Any:
    """The value of JSON text; half of a surrogate pair, which can be escaped and is no text, is a ValueError."""
    value = json.loads(text, **options)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def json_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number from 1, line) of a JSON-lines text, without empty lines. Only a line feed ends a line: strings may hold
    U+2028 and the like.
    """
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
