"""Reading JSON lines as a stream that can go on from where it stood: plain files by byte, members of a zip by line."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator
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


def read_lines(source: Path, cursor: list[Any] | None, suffixes: tuple[str, ...] = (".jsonl",)) -> Iterator[Line]:
    """The lines of a file, of the members of a zip, or of every such file below a folder, in name order."""
    if source.is_dir():
        files = sorted(p for p in source.rglob("*") if p.suffix in (*suffixes, ".zip"))
        if not files:
            raise ConfigError(f"{source}: no {' or '.join(suffixes)} or .zip file here")
    else:
        files = [source]
    at = cursor or ["", 0, 0]
    for number, path in enumerate(files):
        relative = path.name if path == source else path.relative_to(source).as_posix()
        opened = zipfile.ZipFile(path) if path.suffix == ".zip" else None
        names = (
            [relative]
            if opened is None
            else [f"{relative}!{n}" for n in sorted(opened.namelist()) if n.endswith(suffixes)]
        )
        if not names:
            raise ConfigError(f"{path}: holds no {' or '.join(suffixes)} file")
        for name in names:
            if name < at[0]:
                continue
            line, byte = (at[1], at[2]) if name == at[0] else (0, 0)
            with open(path, "rb") if opened is None else opened.open(name.rpartition("!")[2]) as stream:
                size = os.path.getsize(path) if opened is None else opened.getinfo(name.rpartition("!")[2]).file_size
                for found in _from_stream(stream, name, line, byte, opened is None):
                    share = (number + found.cursor[2] / max(size, 1)) / len(files)
                    yield Line(found.where, found.cursor, min(share, 1.0), found.value, found.problem)


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
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            yield Line(where, cursor, 0.0, problem=f"not JSON: {getattr(error, 'msg', error)}")


def read_list(source: Path, cursor: int | None) -> Iterator[tuple[int, int, Any]]:
    """(next index, total, element) of a JSON file that holds one list."""
    try:
        values = json.loads(source.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source}: not JSON: {error}") from error
    if not isinstance(values, list):
        raise ConfigError(f"{source}: expected a list of records, found {type(values).__name__}")
    for i in range(cursor or 0, len(values)):
        yield i + 1, len(values), values[i]
