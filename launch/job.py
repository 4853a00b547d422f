"""What a stage sees of the run it belongs to."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..core.files import write_json
from ..core.mesh import Mesh
from ..core.progress import say
from ..core.run import Run
from ..models.config import ModelConfig
from .recipe import Recipe
from .stragglers import SLOW, Pace

log = logging.getLogger("terrella")


class StopRequested(Exception):
    """A signal asked to stop, and the stage has saved."""


@dataclass
class Job:
    """One worker's view: recipe, run directory, the mesh of ranks, and the model's sizes."""

    recipe: Recipe
    run: Run
    mesh: Mesh
    model: ModelConfig  # with the tokenizer's vocabulary
    stop_asked: bool = field(default=False)
    pace: Pace = field(default_factory=Pace)
    started_at: float = 0.0  # monotonic clock, earlier by what the stage took before the checkpoint it went on from
    saving_s: float = 0.0  # seconds that the stage has spent waiting for its checkpoints

    def __post_init__(self) -> None:
        self.run = replace(self.run, extra=self._extra_values)

    def _extra_values(self) -> dict[str, float]:
        """What every row of the record gets beside the step's own values."""
        return self.pace.values() | ({"time/saving_s": round(self.saving_s, 6)} if self.saving_s else {})

    def start_stage(self) -> None:
        """Count a stage's seconds from now."""
        self.started_at, self.saving_s = time.monotonic(), 0.0

    def spent(self) -> dict[str, float]:
        """Seconds that the stage has taken, those before the checkpoint that it went on from among them."""
        saving = {"time/saving_s": round(self.saving_s, 3)} if self.saving_s else {}
        return {"time/stage_s": round(time.monotonic() - self.started_at, 1), **saving}

    @contextmanager
    def paused_for_saving(self) -> Iterator[None]:
        """Count the seconds of a block as time spent waiting for checkpoints."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.saving_s += time.monotonic() - start

    def stage_folder(self, name: str) -> Path:
        """Where a stage keeps its data."""
        return self.run.path / "stages" / name

    def checkpoints(self, name: str) -> Path:
        """Where a stage keeps its checkpoints."""
        return self.run.path / "checkpoints" / name

    def later(self, name: str) -> tuple[str, ...]:
        """The stages after this one."""
        names = [stage.name for stage in self.recipe.stages]
        return tuple(names[names.index(name) + 1 :])

    def outcome(self, name: str) -> dict[str, Any]:
        """The outcome of a finished stage."""
        outcome = self.run.outcome(name)
        if outcome is None:
            raise RuntimeError(f"stage '{name}' has not finished")
        return outcome

    def listen(self) -> None:
        """Handle requests to save and stop (SIGUSR1 from the supervisor, or a scheduler's warning), including one that
        arrived earlier.
        """

        def ask(_number: int, _frame: object) -> None:
            self.stop_asked = True

        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, ask)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the supervisor, which asks us
        # blocked by the supervisor until now
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT))

    def warn(self, text: str) -> None:
        """Warn the user once, in the log and on the terminal."""
        if self.mesh.is_main:
            log.warning("%s", text)
            say(f"warning: {text}")

    def end_of_step(self, ready: bool = True) -> tuple[bool, bool]:
        """Whether any rank was asked to stop, and whether all are `ready`. Every rank calls it at the end of a step; it
        also finds ranks that slow the others down.
        """
        self.pace.waited = self.mesh.waited
        per_rank = self.mesh.gather_all((self.stop_asked, ready, self.pace.lap()))
        self.mesh.waited = 0.0
        if len(per_rank) > 1:
            had = bool(self.pace.slow)
            new = self.pace.judge([lap for *_, lap in per_rank])
            if self.mesh.is_main and (new or had != bool(self.pace.slow)):
                for slow in new:
                    log.warning("%s", slow.text())
                self.run.guard()
                write_json(
                    self.run.path / SLOW, {"time": time.time(), "ranks": [asdict(slow) for slow in self.pace.slow]}
                )
        return any(stop for stop, _, _ in per_rank), all(ready for _, ready, _ in per_rank)
