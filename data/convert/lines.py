"""Reads JSON lines as a resumable stream: plain files resume by byte, members of a zip by line."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError


@dataclass(frozen=True)
class Line:
    """A parsed line, or what is wrong with it."""

    where: str
    cursor: list[Any]  # [file, line, byte]
    done: float
    value: Any = None
    problem: str | None = None


def files_below(source: Path, suffixes: tuple[str, ...]) -> list[tuple[str, Path]]:
    """(name, path) of a file, or of all such files below a folder, sorted by name: a cursor holds a name, and files
    that sort before it have been read.
    """
    if not source.is_dir():
        return [(source.name, source)]
    files = sorted((p.relative_to(source).as_posix(), p) for p in source.rglob("*") if p.suffix in suffixes)
    if not files:
        raise ConfigError(f"{source}: no {' or '.join(suffixes)} file here")
    return files


def read_lines(source: Path, cursor: list[Any] | None) -> Iterator[Line]:
    """The lines of a file, of the members of a zip, or of every such file below a folder, in name order."""
    files = files_below(source, (".jsonl", ".zip"))
    at = cursor or ["", 0, 0]
    for number, (relative, path) in enumerate(files):
        with _zip_errors(path):
            opened = zipfile.ZipFile(path) if path.suffix == ".zip" else None
            members = [relative] if opened is None else sorted(n for n in opened.namelist() if n.endswith(".jsonl"))
            if not members:
                raise ConfigError(f"{path}: holds no .jsonl file")
            for member in members:
                name = relative if opened is None else f"{relative}!{member}"
                if name < at[0]:
                    continue
                line, byte = (at[1], at[2]) if name == at[0] else (0, 0)
                size = path.stat().st_size if opened is None else opened.getinfo(member).file_size
                with open(path, "rb") if opened is None else opened.open(member) as stream:
                    for found in _from_stream(stream, name, line, byte, opened is None):
                        share = (number + found.cursor[2] / max(size, 1)) / len(files)
                        yield Line(found.where, found.cursor, min(share, 1.0), found.value, found.problem)


@contextmanager
def _zip_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ConfigError(f"{path}: not a whole zip file ({error})") from error


def _from_stream(stream: Any, name: str, line: int, byte: int, seekable: bool) -> Iterator[Line]:
    if seekable:
        stream.seek(byte)
    else:
        for _ in range(line):
            stream.readline()
    for raw in stream:
        line, byte = line + 1, byte + len(raw)
        if not raw.strip():
            continue
        where, cursor = f"{name}:{line}", [name, line, byte]
        try:
            yield Line(where, cursor, 0.0, json.loads(raw))
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or a huge number
            yield Line(where, cursor, 0.0, problem=f"not JSON: {getattr(error, 'msg', error)}")


def load_json(path: Path) -> Any:
    """The value of a JSON file of the source."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error


def read_list(source: Path, cursor: int | None) -> Iterator[tuple[int, int, Any]]:
    """(next index, total, element) of a JSON file that holds one list."""
    values = load_json(source)
    if not isinstance(values, list):
        raise ConfigError(f"{source}: expected a list of records, found {type(values).__name__}")
    for i in range(cursor or 0, len(values)):
        yield i + 1, len(values), values[i]
