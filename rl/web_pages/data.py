"""Recorded page transitions and their split: some episodes are held out, and whole pages too."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...core.files import json_lines, parse_json
from ...data.schema import PAIR
from .prompt import PageTransition
from .tree import BadTree

SHIPPED = "recorded.jsonl.gz"  # 5,040 transitions of pages.html, recorded in Chromium by rl/web_pages/record.py


def load_transitions(path: str | Path | None = None) -> list[PageTransition]:
    """Transitions of a JSONL file (plain or gzip), or those that ship with the project."""
    file = Path(path) if path is not None else Path(__file__).with_name(SHIPPED)
    if not file.is_file():
        raise ConfigError(f"{file}: no such file of page transitions")
    try:
        blob = file.read_bytes()
        text = (gzip.decompress(blob) if blob[:2] == b"\x1f\x8b" else blob).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as JSONL, plain or gzip: {error}") from error
    found = []
    for number, line in json_lines(text):
        try:
            found.append(PageTransition.from_row(parse_json(line)))
        except ValueError as error:
            raise ConfigError(f"{file}: line {number}: {error}") from error
    if not found:
        raise ConfigError(f"{file}: holds no page transitions")
    return found


@dataclass(frozen=True)
class PageSplit:
    """Steps to learn from, held-out steps of the same pages, and all steps of pages held out whole."""

    train: list[PageTransition]
    test: list[PageTransition]
    unseen_pages: list[PageTransition]


def split_pages(steps: Sequence[PageTransition], *, every: int = 5, unseen: Sequence[str] = ()) -> PageSplit:
    """Every `every`-th episode is held out (a step without a previous action begins one); its questions are not
    trained on.
    """
    train, test, others = [], [], []
    episode = -1
    for step in steps:
        episode += step.previous_action == ""
        if step.url in unseen:
            others.append(step)
        else:
            (test if episode % every == 0 else train).append(step)
    asked = {(s.observation, s.action) for s in test}
    return PageSplit([s for s in train if (s.observation, s.action) not in asked], test, others)


def page_pair(step: PageTransition, prompt: Callable[[PageTransition], str], split: str) -> dict[str, Any]:
    """The sample of one transition; its target is the change list."""
    try:
        changes = step.changes
    except BadTree as error:
        raise ConfigError(
            f"transitions: {step.action!r} on {step.url}: a page is no accessibility tree: {error}"
        ) from error
    return {
        "prompt.json": [{"role": "user", "content": prompt(step)}],
        "target.json": changes.write(),
        "extra.json": {
            "schema": PAIR,
            "source": "web_agent",
            "split": split,
            "url": step.url,
            "action": step.action,
            "gold": not changes.empty,
        },
    }
