"""Files of rows: JSON lines (plain or .gz), a JSON list, parquet, arrow, and our shards.

Each reader checks the whole file when it is opened, so that a bad row is named before a run starts, not in the middle.
"""

from __future__ import annotations

import gzip
import json
import math
import mmap
import zlib
from array import array
from pathlib import Path
from typing import Any, Protocol

from ..core.errors import ConfigError, missing_extra
from ..core.files import parse_json, storage_errors
from .schema import PAIR, TEXT

Kinds = dict[str, tuple[str, str]]  # column -> (kind of its values, where it was first seen)


class Part(Protocol):
    """The rows of one file."""

    kinds: Kinds

    def __len__(self) -> int: ...

    def row(self, i: int) -> dict[str, Any]: ...

    def place(self, i: int) -> str: ...


class JsonLines:
    """JSON lines. A plain file is mapped, a .gz unpacked into memory; a row is parsed each time it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._text = _text_of(path)
        self._start, self._end, self._line = array("q"), array("q"), array("q")
        self.kinds: Kinds = {}
        at, line, size = 0, 0, len(self._text)
        while at < size:
            end = self._text.find(b"\n", at)
            end = size if end < 0 else end
            line += 1
            raw = self._text[at:end]
            if raw.strip():
                row = _parse(raw, f"{path}:{line}", strictly=True)
                note_kinds(self.kinds, row_kinds(row), f"{path}:{line}")
                self._start.append(at)
                self._end.append(end)
                self._line.append(line)
            at = end + 1

    def __len__(self) -> int:
        return len(self._line)

    def row(self, i: int) -> dict[str, Any]:
        return _parse(self._text[self._start[i] : self._end[i]], self.place(i))

    def place(self, i: int) -> str:
        return f"{self.path}:{self._line[i]}"


class JsonList:
    """A JSON file that is one list of objects; all of it is kept in memory."""

    def __init__(self, path: Path) -> None:
        self.path, self.kinds = path, {}
        text = bytes(_text_of(path))
        values = _load_json(text, str(path), strictly=True)
        assert isinstance(values, list)
        for i, value in enumerate(values):
            if not isinstance(value, dict):
                raise ConfigError(f"{self.place(i)}: {describe(value)}, not an object of columns")
            note_kinds(self.kinds, row_kinds(value), self.place(i))
        self._rows: list[dict[str, Any]] = values

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, i: int) -> dict[str, Any]:
        return dict(self._rows[i])

    def place(self, i: int) -> str:
        return f"{self.path}: item {i + 1}"


class ArrowRows:
    """A parquet or arrow file. Arrow is mapped; parquet is decoded once, column by column, into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._table: Any = read_table(path)
        names = self._table.column_names
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"{path}: has two columns '{twice}'; rename one")
        kinds = {field.name: _arrow_kind(field.type) for field in self._table.schema}
        self.kinds: Kinds = {name: (kind, str(path)) for name, kind in kinds.items() if kind}

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, i: int) -> dict[str, Any]:
        one = self._table.slice(i, 1)
        try:
            return one.to_pylist()[0]
        except Exception as error:  # a date outside Python's range, text that is not UTF-8: name the column
            for name in one.column_names:
                try:
                    one.column(name).to_pylist()
                except Exception as cause:
                    raise ConfigError(f"{self.place(i)}: column '{name}' cannot be read: {_short(cause)}") from cause
            raise ConfigError(f"{self.place(i)}: cannot be read: {error}") from error

    def place(self, i: int) -> str:
        return f"{self.path}: row {i + 1}"


class ShardRows:
    """A folder of our shards: text has `messages`, pairs have `prompt` and `answer`, both with their metadata."""

    def __init__(self, folder: Path) -> None:
        from .shards import ShardSet

        self.folder, self.kinds = folder, {}
        self._set = ShardSet(folder)
        for number, path in enumerate(self._set.paths):
            kind = self._set.kind(number)
            if kind not in (TEXT, PAIR):
                held = kind or "samples of another program"
                raise ConfigError(f"{path}: holds {held}; rows are read from {TEXT} and {PAIR}")

    def __len__(self) -> int:
        return len(self._set)

    def row(self, i: int) -> dict[str, Any]:
        sample = self._set[i]
        if "messages.json" in sample:
            columns, own = sample["meta.json"], {"messages": sample["messages.json"]}
        else:
            target = sample["target.json"]
            answer = target if isinstance(target, str) else json.dumps(target, ensure_ascii=False)
            columns, own = sample["extra.json"], {"prompt": sample["prompt.json"], "answer": answer}
        return {**{name: value for name, value in columns.items() if name != "schema"}, **own}

    def place(self, i: int) -> str:
        return f"{self.folder}: sample {i + 1}"


def open_part(path: Path) -> Part:
    """The rows of one file, by its ending; a .json may be a list or, as on the Hugging Face hub, JSON lines."""
    name = path.name
    if name.endswith((".parquet", ".arrow")):
        part: Part = ArrowRows(path)
    elif name.endswith((".json", ".json.gz")) and _begins_list(path):
        part = JsonList(path)
    else:
        part = JsonLines(path)
    if not len(part):
        raise ConfigError(f"{path}: holds no rows")
    return part


def _begins_list(path: Path) -> bool:
    return bytes(_text_of(path)[:4096]).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["


def row_kinds(row: dict[str, Any]) -> dict[str, str]:
    """What each value of a row is, nulls left out: a null fits every column."""
    return {name: describe(value) for name, value in row.items() if value is not None}


def note_kinds(known: Kinds, new: dict[str, str], place: str) -> None:
    """Add what the columns of a row or file hold; a column of another kind than before is refused, with both places."""
    for name, kind in new.items():
        before = known.setdefault(name, (kind, place))
        if before[0] != kind:
            was, there = before
            raise ConfigError(f"{place}: column '{name}' is {kind} here and {was} in {there}; make it one of them")


def describe(value: Any) -> str:
    """What a JSON value is, in words."""
    if isinstance(value, bool):
        return "true or false"
    if value is None or isinstance(value, str):
        return "null" if value is None else "text"
    return "a number" if isinstance(value, int | float) else "a list" if isinstance(value, list) else "an object"


def _arrow_kind(kind: Any) -> str:
    """The same words for an arrow type; "" for one that JSON does not have."""
    import pyarrow.types as types

    if types.is_dictionary(kind):
        kind = kind.value_type
    tests = [
        (types.is_boolean, "true or false"),
        (types.is_string, "text"),
        (types.is_large_string, "text"),
        (types.is_integer, "a number"),
        (types.is_floating, "a number"),
        (types.is_list, "a list"),
        (types.is_large_list, "a list"),
        (types.is_struct, "an object"),
    ]
    return next((word for test, word in tests if test(kind)), "")


def pyarrow_for(path: Path) -> Any:
    """The package that reads a file, or what to install for it."""
    try:
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{path}: {missing_extra(error) or error}") from error
    return pyarrow


def read_table(path: Path) -> Any:
    """The table of a parquet or arrow file, checked."""
    pyarrow = pyarrow_for(path)
    try:
        if path.suffix == ".parquet":
            table = _read_parquet(path, pyarrow.parquet.ParquetFile(path))
        else:
            try:  # datasets writes the stream form of arrow, other tools the file form
                table = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()
            except pyarrow.ArrowInvalid:
                table = pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
        table.validate(full=True)  # pyarrow believes offsets as they are, and follows a damaged one out of the file
        return table
    except ConfigError:
        raise
    except Exception as error:  # beside its own kinds: what Python raises over a damaged name or size
        if isinstance(error, PermissionError):
            raise ConfigError(f"{path}: no permission to read it") from error
        raise ConfigError(f"{path}: not a whole {path.suffix[1:]} file ({_short(error)})") from error


def _read_parquet(path: Path, opened: Any) -> Any:
    try:
        return opened.read()
    except Exception:
        for name in opened.schema_arrow.names:
            try:
                opened.read(columns=[name])
            except Exception as error:
                raise ConfigError(f"{path}: column '{name}' cannot be read: {_short(error)}") from error
        raise


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def require_on_disk(path: Path) -> None:
    """Refuse pipes, devices and files of the kernel: reading them may wait for ever."""
    if path.exists() and (not path.is_file() or path.resolve().parts[1:2] in (("proc",), ("sys",))):
        raise ConfigError(f"{path}: is no regular file on a disk")


def _text_of(path: Path) -> Any:
    """The bytes of a file: mapped, or unpacked where it is a .gz."""
    with storage_errors(path), open(path, "rb") as stream:
        if path.suffix != ".gz":
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        try:
            return gzip.decompress(stream.read())
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ConfigError(f"{path}: not a whole .gz file ({error})") from error


def _parse(raw: bytes, place: str, strictly: bool = False) -> dict[str, Any]:
    value = _load_json(raw, place, strictly)
    if not isinstance(value, dict):
        hint = "; a file that is one JSON list ends in .json" if isinstance(value, list) else ""
        raise ConfigError(f"{place}: {describe(value)}, not an object of columns{hint}")
    return value


def _load_json(raw: bytes, place: str, strictly: bool = False) -> Any:
    """The value of JSON text. `strictly`, as when a file is opened, refuses what Python's parser makes something
    else of in silence.
    """

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON; write null or leave the column out")

    try:
        text = raw.decode("utf-8-sig")
        if not strictly:
            return json.loads(text, parse_constant=refuse)
        return parse_json(text, parse_constant=refuse, parse_float=_finite, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        at = f"{place}:{error.lineno}" if b"\n" in raw.strip() else place
        raise ConfigError(f"{at}: not JSON: {error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ConfigError(f"{place}: not JSON: {error}") from error


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is beyond the range of a number")
    return number


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name '{next(name for name in names if names.count(name) > 1)}' is there twice")
    return made
