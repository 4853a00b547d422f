"""The report's first picture: one held-out room, before and after training, side by side. Drawn as SVG, so that it
needs no script.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .load import RunData, json_lines

CELL = 16
MOST_FRAMES, MOST_CELLS = 6, 16
# symbol -> what is drawn in a cell beside its floor
SHAPES = {
    "#": ("wall",),
    "_": (),
    "O": ("target",),
    "X": ("box",),
    "P": ("player",),
    "√": ("target", "box done"),
    "S": ("target", "player"),
}


@dataclass(frozen=True)
class Frame:
    """One board: (x, y, class) of every drawn cell, its size in cells, and what led to it."""

    label: str
    cells: list[tuple[int, int, str]]
    columns: int
    rows: int
    spoken: str


@dataclass(frozen=True)
class Side:
    """One model's way through the room."""

    name: str
    outcome: str
    frames: list[Frame]


def draw(label: str, text: str) -> Frame | None:
    """A board of known symbols, or None."""
    rows = text.split("\n")
    if (
        not rows[0]
        or len(rows) > MOST_CELLS
        or len(rows[0]) > MOST_CELLS
        or any(len(row) != len(rows[0]) for row in rows)
    ):
        return None
    if not set("".join(rows)) <= set(SHAPES):
        return None
    cells = [
        (x * CELL, y * CELL, name)
        for y, row in enumerate(rows)
        for x, symbol in enumerate(row)
        for name in (SHAPES[symbol] or ("floor",))
    ]
    return Frame(label, cells, len(rows[0]), len(rows), " / ".join(rows))


def frames_of(record: dict[str, Any]) -> list[Frame]:
    """The boards of an episode: true ones of an agent, imagined ones of a world model."""
    frames: list[Frame | None] = []
    for number, turn in enumerate(record["turns"][: MOST_FRAMES - 1]):
        action = str(turn.get("action", ""))[:24]
        boards = turn.get("boards")
        if not isinstance(boards, list) or len(boards) != 2:
            boards = [turn.get("prompt"), turn.get("prediction")]
        first, then = (str(board or "") for board in boards)
        if number == 0:
            frames.append(draw("start", first))
        frames.append(draw(action, then))
    return [frame for frame in frames if frame] if None not in frames else []


def read(run: RunData, stem: str) -> dict[str, dict[str, Any]]:
    """The first sample of each prompt in a rollout file."""
    records: dict[str, dict[str, Any]] = {}
    for path in sorted((run.path / "rollouts").glob(f"{stem}-*.jsonl"))[-1:]:
        for record in json_lines(path, []):  # what is wrong with them is told where rollouts are shown
            turns = record.get("turns")
            whole = isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)
            if whole and isinstance(record.get("reward"), int | float):
                records.setdefault(str(record.get("prompt_id")), record)
    return records


def outcome_of(record: dict[str, Any]) -> str:
    if isinstance(record.get("solved"), bool):
        return "solved" if record["solved"] else "not solved"
    turns = record["turns"]
    return f"{sum(turn.get('exact') is True for turn in turns)} of {len(turns)} states right"


def before_and_after(run: RunData) -> list[Side]:
    """Both sides of the first kept room in which training made a difference (the first room where it made none);
    empty without any.
    """
    pair = run.summary.get("compare")
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(p, dict) and p.get("rollouts") for p in pair):
        return []
    before, after = (read(run, str(p["rollouts"])) for p in pair)
    common = [key for key in before if key in after]
    better = [key for key in common if after[key]["reward"] > before[key]["reward"]]
    for key in better + common:
        sides = [
            Side(str(p["name"]), outcome_of(side[key]), frames_of(side[key]))
            for p, side in zip(pair, (before, after), strict=True)
        ]
        if all(side.frames for side in sides):
            return sides
    return []
