"""Chats: LLaMA-Factory's sharegpt JSON and JSONL with messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..schema import TEXT
from .base import Item
from .lines import read_lines, read_list

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "function_call": "assistant",
}


def text_sample(messages: list[dict[str, Any]], **meta: Any) -> dict[str, Any]:
    """A text trajectory of messages."""
    return {"messages.json": messages, "meta.json": {"schema": TEXT, **meta}}


def sharegpt_messages(record: Any) -> list[dict[str, Any]] | str:
    """Messages of one sharegpt record, or why there are none."""
    if not isinstance(record, dict):
        return "not a record"
    turns = record.get("conversations") or record.get("messages")
    if not isinstance(turns, list) or not turns:
        return "no conversations"
    if not all(isinstance(turn, dict) for turn in turns):
        return "a turn that is no object"
    messages = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    for turn in turns:
        role = SHAREGPT_ROLES.get(str(turn.get("from", turn.get("role"))))
        content = turn.get("value", turn.get("content"))
        if role is None:
            return f"unknown speaker {turn.get('from', turn.get('role'))!r}"
        if not isinstance(content, str):
            return "a turn without text"
        messages.append({"role": role, "content": content})
    if messages[-1]["role"] != "assistant":
        return "the last turn is not the assistant's"
    if not messages[-1]["content"]:
        return "the last answer is empty"
    return messages


def openai_messages(record: Any) -> list[dict[str, Any]] | str:
    """Messages of a record in the usual {role, content} form, of prompt + completion, or of sharegpt; or why there
    are none.
    """
    if not isinstance(record, dict):
        return "not a record"
    given = record.get("messages")
    if isinstance(given, list) and given and all(isinstance(m, dict) for m in given) and "role" in given[0]:
        messages = [{k: m[k] for k in ("role", "content", "learn") if k in m} for m in given]
        if not any(m.get("role") == "assistant" for m in messages):
            return "no answer of the assistant"
        return messages
    if isinstance(record.get("prompt"), str) and isinstance(record.get("completion"), str):
        return [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record["completion"]}]
    if "conversations" in record:
        return sharegpt_messages(record)
    return "no messages, prompt and completion, or conversations"


def read_sharegpt(source: Path, cursor: int | None) -> Iterator[Item]:
    """A JSON list of sharegpt records, as LLaMA-Factory keeps them."""
    for index, total, record in read_list(source, cursor):
        yield _item(sharegpt_messages(record), record, index, f"{source.name}[{index - 1}]", index / total)


def read_jsonl(source: Path, cursor: list[Any] | None) -> Iterator[Item]:
    """JSON lines of chats."""
    for line in read_lines(source, cursor):
        messages = line.problem or openai_messages(line.value)
        yield _item(messages, line.value, line.cursor, line.where, line.done)


def _item(messages: list[dict[str, Any]] | str, record: Any, cursor: Any, where: str, done: float) -> Item:
    if isinstance(messages, str):
        return Item(cursor, dropped=messages, where=where, done=done)
    meta = {k: record[k] for k in ("task", "reward", "id", "source") if isinstance(record.get(k), str | int | float)}
    return Item(cursor, text_sample(messages, **meta), where=where, done=done)
