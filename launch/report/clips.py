"""Videos in the report: moving pictures (animated PNG) and sheets of frames, with metrics frame by frame. Complete
in the page.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

from .curves import short
from .load import RunData, number, read_json

BYTES_IN_ALL = 1_500_000
SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Clip:
    """One clip ready for the page; `rows` holds (model, metric, a number for each frame)."""

    title: str
    panels: list[str]
    moving: str
    sheet: str
    sheet_rows: list[str]
    frames: int
    rows: list[tuple[str, str, list[str]]]


def picture(text: Any) -> str | None:
    """Base64 that is a PNG, or None: nothing else may stand in the page as a picture."""
    try:
        data = base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        return None
    return text if data.startswith(SIGNATURE) else None


def shape_clip(raw: Any) -> Clip | None:
    """A clip as the run wrote it, or None where its parts do not fit."""
    if not isinstance(raw, dict):
        return None
    moving, sheet, metrics = picture(raw.get("moving")), picture(raw.get("sheet")), raw.get("metrics")
    frames = raw.get("frames")
    if moving is None or sheet is None or not isinstance(metrics, dict) or not isinstance(frames, int):
        return None
    rows = []
    for model, by_metric in metrics.items():
        for metric, values in by_metric.items() if isinstance(by_metric, dict) else ():
            numbers = [number(v) for v in values] if isinstance(values, list) else []
            rows.append((str(model), str(metric), ["–" if v is None else short(v) for v in numbers][:frames]))
    names = [[str(name)[:60] for name in raw.get(key) or []][:12] for key in ("panels", "rows")]
    return Clip(str(raw.get("title", ""))[:120], names[0], moving, sheet, names[1], frames, rows)


def build_clips(runs: list[RunData]) -> list[tuple[str, list[Clip]]]:
    """(title, clips) of every file under videos/, within the page's budget."""
    built: list[tuple[str, list[Clip]]] = []
    left = BYTES_IN_ALL
    for run in runs:
        for path in sorted((run.path / "videos").glob("*.json")):
            content = read_json(path, run.problems) or {}
            raw = content.get("clips")
            shaped = [shape_clip(clip) for clip in raw] if isinstance(raw, list) else []
            if None in shaped:
                run.problems.append(f"videos/{path.name}: {shaped.count(None)} clips could not be read, left out")
            kept = []
            for clip in shaped:
                if clip is not None and (size := len(clip.moving) + len(clip.sheet)) <= left:
                    left -= size
                    kept.append(clip)
            if kept:
                title = str(content.get("title", path.stem))[:120]
                built.append((f"{run.name} · {title}" if len(runs) > 1 else title, kept))
    return built
