"""Episodes on disk: the release's folder of traces and actions, shards of step samples, and a filmstrip."""

from __future__ import annotations

import base64
import html
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....data.convert.webrl import PAGE, step_sample, trajectory_steps
from ....data.schema import TEXT
from ....data.shards.writer import ShardWriter

UNFINISHED = -0.1  # the release's score of a task that has not ended
SCREENSHOTS = "screehshots"  # as the release spells it
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = (
    "body{font:15px sans-serif}section{display:inline-block;vertical-align:top;width:480px;margin:8px}"
    "img{width:100%;border:1px solid #999}pre{white-space:pre-wrap;overflow:hidden}.error{color:#b00}"
)


@dataclass(frozen=True)
class TraceStep:
    """One step: the page before the action, what the agent wrote, and a picture where the backend draws."""

    html: str
    response: str
    error: str = ""
    picture: bytes = b""


@dataclass(frozen=True)
class Trace:
    """One episode."""

    task_id: str
    intent: str
    steps: tuple[TraceStep, ...]
    score: float = UNFINISHED
    answer: str = ""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The records of traces/<id>.jsonl."""
        return [
            {
                "trace_id": self.task_id,
                "index": i,
                "prompt": self.intent if i == 0 else PAGE,
                "html": step.html,
                "response": step.response,
                "target": self.intent,
            }
            for i, step in enumerate(self.steps)
        ]


def write_trace(folder: str | Path, trace: Trace) -> None:
    """traces/, actions/, render_<id>.html and the pictures, as the release's runner leaves them."""
    if not re.fullmatch(r"[\w-][\w.-]{0,100}", trace.task_id):
        raise ValueError(f"task id {trace.task_id!r} cannot name a file")
    root = Path(folder)
    for name in ("traces", "actions"):
        (root / name).mkdir(parents=True, exist_ok=True)
    _write(
        root / "traces" / f"{trace.task_id}.jsonl",
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in trace.rows),
    )
    told = {"task_id": trace.task_id, "score": trace.score, "actions": [s.response for s in trace.steps]}
    _write(root / "actions" / f"{trace.task_id}.json", json.dumps(told, ensure_ascii=False))
    for i, step in enumerate(trace.steps):
        if step.picture:
            (root / SCREENSHOTS / trace.task_id).mkdir(parents=True, exist_ok=True)
            (root / SCREENSHOTS / trace.task_id / f"{i}.png").write_bytes(step.picture)
    if trace.score >= 0:
        _write(root / f"render_{trace.task_id}.html", filmstrip(trace))


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_shards(folder: str | Path, traces: Iterable[Trace]) -> int:
    """Finished episodes as shards of step samples, equal to those the converter `webrl` makes of the folder; how
    many steps there are.
    """
    count = 0
    with ShardWriter(folder, kind=TEXT) as writer:
        for trace in traces:
            rows = [row for row in trace.rows if row["response"]]
            if trace.score < 0 or not rows:
                continue
            for i, record in enumerate(trajectory_steps(rows, trace.score)):
                writer.write(step_sample(record, trace.task_id, i), key=f"{trace.task_id}-{i:04d}")
                count += 1
    return count


def filmstrip(trace: Trace, pictures: Sequence[bytes] | None = None) -> str:
    """One page that shows an episode: pictures with the acted element marked where there are some, else the text of
    the pages.
    """
    parts = []
    for i, step in enumerate(trace.steps):
        picture = pictures[i] if pictures else step.picture
        told = html.escape(step.response) + (f'<p class="error">{html.escape(step.error)}</p>' if step.error else "")
        if picture:
            shown = f'<img alt="step {i}" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
        else:
            shown = f"<pre>{html.escape(step.html[:4000])}</pre>"
        parts.append(f"<section><h2>Step {i}</h2>{shown}<pre>{told}</pre></section>")
    head = f'<!DOCTYPE html><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    head += f"<title>{html.escape(trace.intent)}</title><style>{_STYLE}</style>"
    return (
        f"{head}<h1>{html.escape(trace.intent)}</h1><p>Score {trace.score:g}. Answer: "
        f"{html.escape(trace.answer)}</p>{''.join(parts)}\n"
    )
