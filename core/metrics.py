"""metrics.jsonl: the record of a run, one JSON object per line. Keys except those under `time/` are the same for equal
runs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import StorageError
from .files import json_digest, storage_errors, write_atomic
from .sinks import Sink


def _checked(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no NaN; as text it stays visible
    return value


class MetricsFile:
    """Appends rows; cuts the file back to a checkpoint's step before a stage resumes."""

    def __init__(
        self,
        path: Path,
        guard: Callable[[], None] = lambda: None,
        sinks: Sequence[Sink] = (),
        extra: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.path, self.guard, self.sinks = path, guard, sinks
        self.extra = extra  # current `time/` values, added to every row

    def append(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        """Write one row and force it to disk."""
        values = {**values, **self.extra()}
        line = json.dumps({"stage": stage, "step": step, **{k: _checked(v) for k, v in values.items()}})
        with storage_errors(self.path), open(self.path, "a", encoding="utf-8") as stream:
            # checked after opening: a successor replaces the file, so a write after a later takeover lands in the old
            # one
            self.guard()
            stream.write(line + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        for sink in self.sinks:
            sink.write(stage, step, values)

    def rewind(self, stage: str, step: int, later: tuple[str, ...] = ()) -> None:
        """Drop the rows of `stage` beyond `step`, those of `later` stages, and a torn last line."""
        if not self.path.exists():
            return
        self.guard()
        kept = [
            row
            for row in self.rows()
            if row["stage"] not in later and not (row["stage"] == stage and row["step"] > step)
        ]
        write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def digest(self, stage: str, step: int | None = None) -> dict[str, Any]:
        """The number of rows of a stage, up to `step` if given, and a digest of them."""
        found = [row for row in self.rows() if row["stage"] == stage and (step is None or row["step"] <= step)]
        return {"rows": len(found), "xxh3": json_digest(found)}

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows; a torn last line is skipped, a torn line elsewhere is an error."""
        if not self.path.exists():
            return
        with storage_errors(self.path):
            lines = self.path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                if number >= len(lines):
                    return
                raise StorageError(
                    f"{self.path}:{number}: not a JSON line ({error}); restore the file or delete that line"
                ) from error
            if not (isinstance(row, dict) and isinstance(row.get("stage"), str) and isinstance(row.get("step"), int)):
                raise StorageError(f"{self.path}:{number}: has no stage and step; restore the file or delete that line")
            yield row
