"""Optional sinks beside metrics.jsonl: TensorBoard and Weights & Biases. The file stays the record; a sink only mirrors it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from .errors import ConfigError

SinkName = Literal["tensorboard", "wandb"]


class Sink(Protocol):
    """Takes a copy of every row."""

    def write(self, stage: str, step: int, values: Mapping[str, Any]) -> None: ...


class TensorBoard:
    """Event files under the run's logs; one curve per stage and metric."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "logs" / "tensorboard"))

    def write(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(f"{stage}/{name}", value, step)
        self.writer.flush()


class WandB:
    """A run that Weights & Biases resumes under the same id when ours is resumed."""

    def __init__(self, folder: Path, name: str) -> None:
        import wandb

        self.run = wandb.init(project="terrella", name=name, id=folder.resolve().name, dir=str(folder / "logs"), resume="allow")

    def write(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        self.run.log({f"{stage}/{name}": value for name, value in values.items()} | {f"{stage}/step": step})


def open_sinks(names: list[SinkName], folder: Path, run_name: str) -> list[Sink]:
    """The sinks a recipe asks for; a missing package is named together with the way to install it."""
    sinks: list[Sink] = []
    for name in names:
        try:
            sinks.append(TensorBoard(folder) if name == "tensorboard" else WandB(folder, run_name))
        except ImportError as error:
            raise ConfigError(
                f"sinks: '{name}' needs a package that is not installed ({error}); pip install {name}, or remove it"
            ) from error
    return sinks
