"""What a stage gets to see of the run it is part of."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..core.files import write_json
from ..core.run import Run
from ..data.tokenizers import CharTokenizer
from ..models.config import ModelConfig
from ..rl.imagination import GridDynamics
from .pace import SLOW, Pace
from .recipe import Recipe

log = logging.getLogger("terrella")


class StopRequested(Exception):
    """A signal asked to stop, and the stage has saved."""


@dataclass
class Job:
    """One worker's view: recipe, run directory, its place among the ranks, and the world with its tokenizer."""

    recipe: Recipe
    run: Run
    rank: int
    ranks: int
    dynamics: GridDynamics
    tokenizer: CharTokenizer
    model: ModelConfig
    stop_asked: bool = field(default=False)
    pace: Pace = field(default_factory=Pace)

    def __post_init__(self) -> None:
        self.run = replace(self.run, beside=self.pace.values)

    @property
    def speaks(self) -> bool:
        """Only one rank prints and writes the record."""
        return self.rank == 0

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
        """What a finished stage left."""
        outcome = self.run.outcome(name)
        if outcome is None:
            raise RuntimeError(f"stage '{name}' has not finished")
        return outcome

    def listen(self) -> None:
        """Note a request to save and stop (SIGUSR1 from the supervisor, or a scheduler's warning)."""

        def ask(_number: int, _frame: object) -> None:
            self.stop_asked = True

        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, ask)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the supervisor, which asks us

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is up on any rank; every rank must ask at the same point."""
        return any(self.gather(flag))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        import torch.distributed as dist

        if self.ranks == 1:
            return [value]
        values: list[Any] = [None] * self.ranks
        begun = time.monotonic()
        dist.all_gather_object(values, value)
        self.pace.waited += time.monotonic() - begun
        return values

    def end_of_step(self) -> bool:
        """Whether any rank was asked to stop. Every rank calls it at the end of a step; it also finds ranks that hold the others up."""
        everyone = self.gather((self.stop_asked, self.pace.lap()))
        if self.ranks > 1:
            had = bool(self.pace.slow)
            new = self.pace.judge([lap for _, lap in everyone])
            if self.speaks and (new or had != bool(self.pace.slow)):
                for slow in new:
                    log.warning("%s", slow.text())
                self.run.guard()
                write_json(self.run.path / SLOW, {"time": time.time(), "ranks": [asdict(slow) for slow in self.pace.slow]})
        return any(stop for stop, _ in everyone)

    def barrier(self) -> None:
        """Wait for all ranks; the process group's timeout is the deadline."""
        self.gather(None)

    def share(self, items: Sequence[Any]) -> Sequence[Any]:
        """This rank's contiguous part of a list that divides evenly."""
        each = len(items) // self.ranks
        return items[self.rank * each : (self.rank + 1) * each]
