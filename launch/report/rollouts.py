"""Chooses the rollouts a report can afford to carry and shapes them for the browser."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ...core.files import json_lines
from .load import RolloutFile, RunData, read_rollouts

STEPS_A_STAGE = 10
RECORDS_A_STEP = 24
INVALID_A_STEP = 4
TEXT_LIMIT = 6_000
BYTES_IN_ALL = 2_500_000
TURN_TEXTS = ("context", "prompt", "action", "answer", "prediction", "truth", "after")


def recorded_prompt(run: Path, stages: Collection[str] = ()) -> tuple[Path, str] | None:
    """A prompt as a model of the run read it, and its file: from the newest rollouts, those of `stages` before all
    others.
    """

    def place(path: Path) -> tuple[bool, float]:
        return path.stem.rpartition("-")[0] in stages, path.stat().st_mtime

    for path in sorted((run / "rollouts").glob("*.jsonl"), key=place, reverse=True):
        for _, line in json_lines(path.read_text(encoding="utf-8")):
            for turn in json.loads(line).get("turns", []):
                if turn.get("context"):
                    return path, turn["context"]
    return None


def spread(items: list[Any], count: int) -> list[Any]:
    """`count` items evenly spaced, both ends included."""
    if len(items) <= count:
        return items
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)] if count > 1 else items[-1:]


def cut(value: Any, limit: int) -> str:
    text = value if isinstance(value, str) else "" if value is None else str(value)
    return (
        text
        if len(text) <= limit
        else f"{text[:limit]}\n… {len(text) - limit} more characters are in the run directory"
    )


def find_grid(text: str, like: str) -> str | None:
    """The last block of lines in `text` with the shape of the grid `like`: the state that the model was shown."""
    shape = [len(line) for line in like.split("\n")]
    if len(shape) < 2 or len(set(shape)) != 1 or not shape[0]:
        return None
    lines = text.split("\n")
    for start in range(len(lines) - len(shape), -1, -1):
        block = lines[start : start + len(shape)]
        if [len(line) for line in block] == shape:
            return "\n".join(block)
    return None


def shape_turn(turn: Any, previous_truth: str | None, limit: int) -> dict[str, Any]:
    """One turn with texts cut to `limit`; `before` is the true state it started from, which tells changed cells from
    kept ones.
    """
    if not isinstance(turn, dict):
        return {"prediction": cut(turn, limit)}
    shaped: dict[str, Any] = {name: cut(turn[name], limit) for name in TURN_TEXTS if turn.get(name) is not None}
    if isinstance(turn.get("exact"), bool):
        shaped["exact"] = turn["exact"]
    if isinstance(turn.get("reward"), int | float) and abs(turn["reward"]) < float("inf"):
        shaped["reward"] = turn["reward"]
    if isinstance(turn.get("boards"), list) and all(isinstance(board, str) for board in turn["boards"]):
        shaped["boards"] = [cut(board, limit) for board in turn["boards"][:2]]
    truth = shaped.get("truth", "")
    before = turn.get("before") or previous_truth or find_grid(shaped.get("prompt", ""), truth)
    if isinstance(before, str) and truth:
        shaped["before"] = cut(before, limit)
    return shaped


def shape_record(record: dict[str, Any], run: int, file: RolloutFile, limit: int) -> dict[str, Any]:
    """A trajectory for the browser; unknown scalar fields are kept under `extra`."""
    turns, previous = [], None
    raw_turns = record.get("turns")
    for turn in raw_turns if isinstance(raw_turns, list) else []:
        turns.append(shape_turn(turn, previous, limit))
        previous = turns[-1].get("truth")
    known = {"stage", "step", "prompt_id", "sample", "reward", "invalid", "turns"}
    extra = {
        key: value for key, value in record.items() if key not in known and isinstance(value, str | int | float | bool)
    }
    reward = record.get("reward")
    return {
        "run": run,
        "stage": file.stage,
        "step": file.step,
        "prompt": cut(record.get("prompt_id", ""), 200),
        "sample": cut(record.get("sample", ""), 20),
        "reward": reward
        if isinstance(reward, int | float) and reward == reward and abs(reward) != float("inf")
        else None,
        "invalid": cut(record["invalid"], 500) if record.get("invalid") else None,
        "turns": turns,
        "extra": {cut(key, 100): cut(value, 500) for key, value in extra.items()},
    }


def choose(records: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The first `count` in the file's order (whole groups stay together), and a few invalid ones from further down."""
    kept = records[:count]
    late = [record for record in records[count:] if record.get("invalid")]
    return kept + late[:INVALID_A_STEP]


def build_rollouts(runs: list[RunData]) -> tuple[list[dict[str, Any]], int, Counter]:
    """(records to embed, how many the files read hold, invalid reasons there). The result is cut until it fits the
    budget.
    """
    chosen: list[tuple[int, RolloutFile]] = []
    for index, run in enumerate(runs):
        for stage in dict.fromkeys(file.stage for file in run.rollout_files):
            chosen += [
                (index, file)
                for file in spread([file for file in run.rollout_files if file.stage == stage], STEPS_A_STAGE)
            ]
    for index, file in chosen:
        runs[index].problems += read_rollouts(file)
    invalid: Counter = Counter()
    for _, file in chosen:
        invalid.update(file.invalid)
    total = sum(file.total for _, file in chosen)

    count, limit = RECORDS_A_STEP, TEXT_LIMIT
    while True:
        records = [
            shape_record(record, index, file, limit) for index, file in chosen for record in choose(file.records, count)
        ]
        if len(json.dumps(records)) <= BYTES_IN_ALL or not chosen:
            return records, total, invalid
        if count > 1 or limit > 200:
            count, limit = max(1, count // 2), max(200, limit // 2)
        else:
            chosen = chosen[1::2]
