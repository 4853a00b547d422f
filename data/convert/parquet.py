"""Parquet and arrow files: RLVR-World's processed rows, and Hugging Face datasets folders. Needs pyarrow."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ..row_files import pyarrow_for, read_table
from ..schema import PAIR
from .base import Item
from .chat import openai_messages, text_sample
from .lines import files_below

BATCH = 256


def rows(source: Path, cursor: list[Any] | None) -> Iterator[tuple[list[Any], str, float, dict[str, Any]]]:
    """(cursor, where, share done, row) of every parquet or arrow file of a folder, a batch in memory at a time."""
    files = files_below(source, (".parquet", ".arrow"))
    at = cursor or ["", 0]
    for number, (name, path) in enumerate(files):
        if name < at[0]:
            continue
        skip, row = at[1] if name == at[0] else 0, 0
        for total, batch in _batches(path):
            if row + batch.num_rows <= skip:
                row += batch.num_rows
                continue
            for record in batch.to_pylist():
                row += 1
                if row > skip:
                    yield [name, row], f"{name}:{row - 1}", (number + row / max(total, 1)) / len(files), record


def _batches(path: Path) -> Iterator[tuple[int, Any]]:
    """(rows of the file, a batch of them)."""
    if path.suffix == ".arrow":
        table = read_table(path)
        yield from ((table.num_rows, batch) for batch in table.to_batches(BATCH))
        return
    pyarrow = pyarrow_for(path)
    try:
        opened = pyarrow.parquet.ParquetFile(path)
        yield from ((opened.metadata.num_rows, batch) for batch in opened.iter_batches(BATCH))
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not a whole parquet file ({error})") from error


def read_rlvr(source: Path, cursor: list[Any] | None) -> Iterator[Item]:
    """RLVR-World rows: prompt, reward_model.ground_truth, extra_info; the web page rows keep their other columns."""
    for here, where, done, row in rows(source, cursor):
        prompt, truth = row.get("prompt"), _section(row, "reward_model").get("ground_truth")
        if not isinstance(prompt, list) or not prompt or not all(_is_message(m) for m in prompt):
            yield Item(here, dropped="no prompt", where=where, done=done)
            continue
        if not isinstance(truth, str) or not truth:
            yield Item(here, dropped="no ground truth", where=where, done=done)
            continue
        info = _section(row, "extra_info")
        extra: dict[str, Any] = {
            "schema": PAIR,
            "source": row.get("data_source"),
            "split": info.get("split"),
            "index": info.get("index"),
        }
        if isinstance(info.get("data_state"), str):
            extra |= {"state": _json_or_text(info["data_state"]), "action": info.get("data_action")}
            if game := _game(str(prompt[-1]["content"])):
                extra["game"] = game
        for name in ("task_id", "step_idx", "previous_actions", "answer"):
            if row.get(name) is not None:
                extra[name] = row[name]
        messages = [{"role": m["role"], "content": m["content"]} for m in prompt]
        yield Item(
            here,
            {"prompt.json": messages, "target.json": _json_or_text(truth), "extra.json": extra},
            where=where,
            done=done,
        )


def _section(row: dict[str, Any], name: str) -> dict[str, Any]:
    return row[name] if isinstance(row.get(name), dict) else {}


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value and "content" in value


# the words around the task of the game that is asked about: the release's, and ours
_AFTER = r"(?:Here (?:are|is) |Current observation:)"
_TASK = (
    re.compile(rf"Here is the game that you need to simulate:\s*Task Description:\s*(.+?)\s*{_AFTER}", re.DOTALL),
    re.compile(r"Now the game to simulate\.\s*The task of this game: (.+?)\s*\n\n", re.DOTALL),
)


def _game(prompt: str) -> str:
    """What tells the games of public rows apart, which have no column for it: the task that the prompt describes
    last.
    """
    found = [words for pattern in _TASK for words in pattern.findall(prompt)]
    return " ".join(found[-1].split())[:80] if found else ""


def read_hf(source: Path, cursor: list[Any] | None) -> Iterator[Item]:
    """Chats of a datasets folder: messages, conversations, or prompt and completion."""
    for here, where, done, row in rows(source, cursor):
        messages = openai_messages(row)
        if isinstance(messages, str):
            yield Item(here, dropped=messages, where=where, done=done)
        else:
            yield Item(here, text_sample(messages), where=where, done=done)


def _json_or_text(text: str) -> Any:
    """A serialized state is JSON; a list of page changes is plain text."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return value if isinstance(value, dict | list) else text
