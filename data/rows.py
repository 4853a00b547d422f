"""Rows of a user's own data: read directly, and turned into a prompt, a demonstration and what a reward gets to know.

A row is a dict of columns. Its prompt is the column `messages` without the assistant's answer at its end, or the column
`prompt`, or what a jinja template makes of its columns.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

from ..core.errors import ConfigError
from ..core.files import file_digest, json_digest, read_json
from ..core.process import alarm
from .row_files import Kinds, Part, ShardRows, note_kinds, open_part, require_on_disk

ENDINGS = (".jsonl", ".jsonl.gz", ".ndjson", ".json", ".json.gz", ".parquet", ".arrow")
ANSWERS = ("answer", "completion", "response", "target")  # columns that hold a demonstration, the first that is there
RENDER_S = 10.0  # for one row's prompt: a template is a program, and may never end
LARGEST = 1_000_000  # characters or bits that a product or power in a template may have
ROLES = ("system", "user", "assistant", "tool")
_ABOUT = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # files about rows, not of rows
_SPLIT = re.compile(r"(?:^|[-_.])(train|test|validation|valid|val|dev|eval)(?=[-_.\d])", re.IGNORECASE)


class Rows(Sequence[dict[str, Any]]):
    """The rows of a file or folder, in the order of the file names; each is read when it is asked for."""

    def __init__(self, path: Path, parts: list[Part]) -> None:
        self.path, self._parts = path, parts
        self._ends = list(accumulate(len(part) for part in parts))
        self.kinds: Kinds = {}
        for part in parts:
            for name, (kind, place) in part.kinds.items():
                note_kinds(self.kinds, {name: kind}, place)

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        part, i = self._inside(index)
        return part.row(i)

    def where(self, index: int) -> str:
        """The file and line (or row) of a row, for messages."""
        part, i = self._inside(index)
        return part.place(i)

    def _inside(self, index: int) -> tuple[Part, int]:
        i = index + len(self) if index < 0 else index
        if not 0 <= i < len(self):
            raise IndexError(f"{self.path}: row {index} of {len(self)}")
        number = bisect.bisect_right(self._ends, i)
        return self._parts[number], i - (self._ends[number - 1] if number else 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return read_rows, (self.path,)  # another process maps the files itself


def read_rows(path: str | Path) -> Rows:
    """The rows of a JSON lines, JSON, parquet or arrow file, of a folder of them, a datasets folder, or shards."""
    path = Path(path)
    files = _files_at(path)
    return Rows(path, [ShardRows(path)] if files[0].suffix == ".tar" else [open_part(file) for file in files])


def rows_digest(path: str | Path) -> str:
    """A digest of the files that `read_rows` reads, by name and content."""
    return json_digest({file.name: file_digest(file) for file in _files_at(Path(path))})


def _files_at(path: Path) -> list[Path]:
    """The files of rows, or the shards, that a path names; none that reading may wait for without end."""
    if path.is_file():
        if not path.name.endswith(ENDINGS):
            raise ConfigError(f"{path}: rows are read from {', '.join(ENDINGS)} files and folders of them or of shards")
        files = [path]
    elif path.is_dir():
        files = sorted(path.glob("*.tar")) or _files_of(path)
    else:
        raise ConfigError(f"{path}: no such file or folder")
    for file in files:
        require_on_disk(file)
    return files


def _files_of(folder: Path) -> list[Path]:
    """The data files of a folder in name order, or those that a folder of `datasets` lists."""
    splits = _names_in(folder / "dataset_dict.json", "splits")
    if splits:
        raise ConfigError(f"{folder}: holds the splits {', '.join(splits)}; name one, as {folder / splits[0]}")
    listed = _names_in(folder / "state.json", "_data_files")
    if listed:  # written by save_to_disk; other arrow files in the folder are its caches
        files = [folder / Path(name).name for name in listed]
        missing = next((file for file in files if not file.is_file()), None)
        if missing is not None:
            raise ConfigError(f"{missing}: state.json lists it, and it is not here; copy the folder again")
        return files
    entries = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    files = [p for p in entries if p.name.endswith(ENDINGS) and p.name not in _ABOUT]
    if not files:
        below = [p.name for p in entries if p.is_dir()]
        hint = f"; it has the folders {', '.join(below[:5])}: name one" if below else ""
        raise ConfigError(f"{folder}: no {', '.join(ENDINGS)} or .tar file here{hint}")
    splits = sorted({match[1].lower() for file in files if (match := _SPLIT.search(file.name))})
    if len(splits) > 1:
        both = " and ".join(splits)
        raise ConfigError(f"{folder}: holds files of {both}, which must not be mixed; name one file")
    return files


def _names_in(path: Path, key: str) -> list[str]:
    """The names that a file of `datasets` lists under a key; none where there is no such file or list."""
    held = read_json(path)
    entries = held.get(key) if isinstance(held, dict) else None
    if not isinstance(entries, list):
        return []
    names: list[Any] = [entry.get("filename") if isinstance(entry, dict) else entry for entry in entries]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path}: '{key}' must list names; copy the folder again")
    return names


def render_prompt(row: dict[str, Any], template: str | None, where: str) -> str | list[dict[str, Any]]:
    """What is said to the model first: text or a list of messages. `template` is jinja, inline or a file of it."""
    if template is not None:
        return _render(template, row, where)
    if row.get("messages") is not None:
        messages = _messages(row["messages"], "messages", where)
        before = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        if not before:
            raise ConfigError(f"{where}: column 'messages' has nothing before the assistant's answer")
        return before
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        return _messages(prompt, "prompt", where)
    if prompt is None:
        raise ConfigError(f"{where}: has no column 'prompt' or 'messages' (columns: {_columns(row)}); set template")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(f"{where}: column 'prompt' must be text or a list of messages, not {str(prompt)[:60]!r}")
    return prompt


def demonstration(row: dict[str, Any], column: str | None, where: str = "a row") -> str | None:
    """The answer to imitate: the named column, else the assistant's message ending `messages`, else one of ANSWERS.

    None where there is none, or it is no text or number: a list of accepted answers is for a reward.
    """
    value = _answer(row, column, where)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(
            f"{where}: the answer is {value}, as an empty cell becomes in some tables; leave the row out or fill it in"
        )
    return None if value is None or value == "" or isinstance(value, bool | list | dict) else str(value)


def info_of(row: dict[str, Any], template: str | None = None, column: str | None = None) -> dict[str, Any]:
    """What a reward gets to know: every column but the prompt's own, as it is, and the true answer as `answer`."""
    said = None if template is not None else "messages" if row.get("messages") is not None else "prompt"
    info = {name: value for name, value in row.items() if name != said}
    if (column is not None or "answer" not in info) and (answer := _answer(row, column, "a row")) is not None:
        info["answer"] = answer
    return info


def _answer(row: dict[str, Any], column: str | None, where: str) -> Any:
    """The true answer of a row as the file has it."""
    if column is not None:
        if column not in row:
            raise ConfigError(f"{where}: no column '{column}' (columns: {_columns(row)}); set answer to one of them")
        return row[column]
    if row.get("messages") is not None:
        last = _messages(row["messages"], "messages", where)[-1]
        if last["role"] == "assistant":
            return last["content"]
    return next((row[name] for name in ANSWERS if row.get(name) is not None), None)


def template_text(template: str) -> str:
    """The text of a template: of the .jinja, .j2 or .txt file that it names, else the template itself."""
    if "\n" in template or "{" in template:
        return template
    if not template.endswith((".jinja", ".j2", ".txt")):
        raise ConfigError(f"template: {template!r} uses no column ({{{{ name }}}}), and is no .jinja, .j2 or .txt file")
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"template: {template}: {getattr(error, 'strerror', None) or error}") from error


class _Empty(Exception):
    """A template writes an empty cell."""


def _written(value: Any) -> Any:
    """A value that a template writes, unless a prompt would say None or nan in its place."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise _Empty
    return value


@lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    from jinja2 import StrictUndefined, TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Bounded(ImmutableSandboxedEnvironment):
        """Products and powers that would fill the memory are refused; loops end by the clock."""

        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            held, times = (left, right) if isinstance(left, Sequence) else (right, left)
            size = 0
            if operator == "**" and isinstance(left, int) and isinstance(right, int):
                size = left.bit_length() * right
            elif isinstance(held, Sequence) and isinstance(times, int):
                size = len(held) * times
            if size > LARGEST:
                raise OverflowError(f"the result of {operator} would be too large")
            return super().call_binop(context, operator, left, right)

    text, environment = template_text(template), Bounded(undefined=StrictUndefined, finalize=_written)
    # a prompt is made anew by every rank and every resume: nothing in it is a matter of chance
    del environment.filters["random"], environment.globals["lipsum"]
    try:
        return environment.from_string(text)
    except TemplateSyntaxError as error:
        line = text.splitlines()[error.lineno - 1]
        raise ConfigError(f"template: line {error.lineno}: {error.message}, in {line!r}") from error


def _render(template: str, row: dict[str, Any], where: str) -> str:
    from jinja2 import UndefinedError

    compiled = _compiled(template)
    try:
        with alarm(RENDER_S):
            text = compiled.render(row)
    except UndefinedError as error:
        raise ConfigError(f"{where}: template: {error.message} (columns: {_columns(row)})") from error
    except _Empty as error:
        empty = [name for name, value in row.items() if value is None or value != value]
        raise ConfigError(
            f"{where}: template: writes an empty cell (empty here: {', '.join(empty) or 'a part of a column'}); fill "
            "it in, leave the row out, or say what stands for it, as in {{ column or '' }}"
        ) from error
    except Exception as error:  # a template is a program: it may divide by zero, or reach for what the sandbox keeps
        raise ConfigError(f"{where}: template: {type(error).__name__}: {error}") from error
    if not text.strip():
        raise ConfigError(f"{where}: the template makes an empty prompt")
    return text


def _messages(value: Any, column: str, where: str) -> list[dict[str, Any]]:
    """A chat as a list of {"role", "content"}; anything else is refused by its place in the list."""
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: column '{column}' must be a list of messages, at least one")
    for number, message in enumerate(value, 1):
        here = f"{where}: column '{column}', message {number}"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ConfigError(f"{here}: needs a role ({', '.join(ROLES)}) and a content")
        if not isinstance(message.get("content"), str):
            raise ConfigError(f"{here}: its content must be text")
    return [{"role": m["role"], "content": m["content"]} for m in value]


def _columns(row: dict[str, Any]) -> str:
    return ", ".join(row) or "none"
