"""A sample in readable form: text as text, tokens as numbers, video as a contact sheet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from .pictures import decode_picture

WIDTH = 100
COLUMNS, MOST_FRAMES = 6, 24  # of a contact sheet


def describe(sample: dict[str, Any], *, lines: int = 40) -> Iterator[str]:
    """Lines that show a sample; shortened values say by how much."""
    yield f"sample {sample['__key__']}"
    frames = [f for f in sample if f.startswith("frames.")]
    for field, value in sample.items():
        if field == "__key__" or field in frames[1:]:
            continue
        if field in frames:
            shape = f" of {value.shape[0]}x{value.shape[1]}" if isinstance(value, np.ndarray) else ""
            yield f"  frames: {len(frames)}{shape}"
        elif field in ("messages.json", "prompt.json"):
            yield f"  {field}"
            for message in value:
                yield from _indented(f"[{message['role']}] {message['content']}", 4, lines)
        elif field.endswith(".json"):
            yield f"  {field}"
            yield from _indented(json.dumps(value, indent=1, ensure_ascii=False), 4, lines)
        elif field.endswith(".txt"):
            yield f"  {field}"
            yield from _indented(value, 4, lines)
        elif isinstance(value, np.ndarray):
            yield f"  {field}: {value.dtype} {list(value.shape)}  {_numbers(value)}"
        else:
            yield f"  {field}: {len(value)} bytes"


def contact_sheet(sample: dict[str, Any]) -> np.ndarray | None:
    """The frames of a video sample side by side in one picture, evenly chosen; None when there are no pictures."""
    names = [f for f in sorted(sample) if f.startswith("frames.") and f != "frames.mp4"]
    if not names:
        return None
    shown = np.unique(np.linspace(0, len(names) - 1, min(MOST_FRAMES, len(names))).round().astype(int))
    chosen = [decode_picture(sample[names[i]]) for i in shown]
    chosen = [p if p.ndim == 3 else np.repeat(p[..., None], 3, axis=2) for p in chosen]
    height, width = chosen[0].shape[:2]
    rows = -(-len(chosen) // COLUMNS)
    sheet = np.full((rows * (height + 2), min(COLUMNS, len(chosen)) * (width + 2), 3), 255, np.uint8)
    for i, picture in enumerate(chosen):
        top, left = i // COLUMNS * (height + 2) + 1, i % COLUMNS * (width + 2) + 1
        sheet[top : top + height, left : left + width] = picture[..., :3]
    return sheet


def _indented(text: str, by: int, most: int) -> Iterator[str]:
    shown = text.splitlines() or [""]
    for line in shown[:most]:
        yield " " * by + (line if len(line) <= WIDTH else f"{line[:WIDTH]} ... ({len(line) - WIDTH} more characters)")
    if len(shown) > most:
        yield " " * by + f"... ({len(shown) - most} more lines)"


def _numbers(array: np.ndarray) -> str:
    flat = array.reshape(-1)
    # foreign arrays may hold text, dates or records
    head = " ".join(f"{v:g}" if isinstance(v, np.number) else str(v) for v in flat[:12])
    return head + (" ..." if flat.size > 12 else "")
