"""Files that are whole or absent: atomic writes, and operating-system errors turned into messages with a remedy."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import StorageError

_REMEDY = {
    errno.ENOSPC: "the disk is full; free space or choose another --run folder, then run the same command again",
    errno.EDQUOT: "the disk quota is used up; free space or choose another --run folder, then run the same command again",
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
    """Create a folder and its parents, or say plainly why not."""
    with storage_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step: a reader, or a kill, sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with storage_errors(path):
        try:
            with open(temporary, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_atomic(path, json.dumps(value, indent=1, sort_keys=False, ensure_ascii=False) + "\n")


def read_json(path: Path, default: Any = None) -> Any:
    """Read a JSON file; `default` when it is not there. A file that is not JSON is a StorageError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return default
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StorageError(f"{path}: not a JSON file ({error}); move it away and run the same command again") from error


def json_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number from 1, line) of JSON lines, empty ones left out. A line feed alone ends a line: strings may hold U+2028 and its like."""
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
