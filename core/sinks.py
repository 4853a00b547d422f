"""Optional sinks beside metrics.jsonl: TensorBoard, Weights & Biases, Prometheus. The file stays the record; a sink
only mirrors it.
"""

from __future__ import annotations

import html
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, Protocol

from .errors import ConfigError
from .files import write_atomic

SinkName = Literal["tensorboard", "wandb", "prometheus"]
PROMETHEUS_VARIABLE = "TERRELLA_PROMETHEUS"  # host:port to listen at; the default is this machine alone, port 9464


PROMPT, ANSWER = ("context", "prompt"), ("answer", "prediction", "action")  # what a turn of a rollout may call them
CLOSING_S = 60.0  # for a sink to send what it still holds


@dataclass(frozen=True)
class Table:
    """Rows under named columns: rollouts of a step, or the results of an evaluation."""

    columns: list[str]
    rows: list[list[Any]]

    def markdown(self) -> str:
        """As text; prompts keep their line breaks."""

        def line(cells: Iterable[Any]) -> str:
            texts = ("" if cell is None else html.escape(str(cell), quote=False) for cell in cells)
            return f"| {' | '.join(text.replace('|', '&#124;').replace(chr(10), '<br>') for text in texts)} |"

        return "\n".join([line(self.columns), line(["---"] * len(self.columns)), *map(line, self.rows)])


def rollout_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """The kept trajectories of a step, a line for each turn: prompt, answer, and the reward of the whole."""

    def text(turn: Mapping[str, Any], names: tuple[str, ...]) -> str:
        return next((str(turn[name]) for name in names if turn.get(name)), "")

    columns = ["prompt_id", "sample", "turn", "prompt", "answer", "reward", "invalid"]
    lines = [
        [
            row.get("prompt_id"),
            row.get("sample"),
            number,
            text(turn, PROMPT),
            text(turn, ANSWER),
            row.get("reward"),
            row.get("invalid"),
        ]
        for row in rows
        for number, turn in enumerate(row.get("turns", ()), 1)
    ]
    return Table(columns, lines)


def result_table(result: Mapping[str, Any]) -> Table:
    """An evaluation's models, baselines and ceilings, a line for each row and column: value, interval and sample
    size.
    """
    lines = []
    for row in result.get("rows", ()):
        for column, cell in zip(result["columns"], row["cells"], strict=True):
            parts = cell if isinstance(cell, dict) else {"value": cell}
            lines.append(
                [row["name"], row.get("kind"), column, *(parts.get(key) for key in ("value", "low", "high", "n"))]
            )
    return Table(["name", "kind", "column", "value", "low", "high", "n"], lines)


class Sink(Protocol):
    """Takes a copy of every row of the record, and of every table."""

    def write(self, stage: str, step: int, values: Mapping[str, Any]) -> None: ...

    def show(self, name: str, step: int, table: Table) -> None: ...

    def close(self) -> None: ...


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

    def show(self, name: str, step: int, table: Table) -> None:
        self.writer.add_text(name, table.markdown(), step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def wandb_id(folder: Path) -> str:
    """The id under which Weights & Biases knows a run. It is kept in the run's folder: folders of different runs are
    often called alike, after the recipe, and one id would join their curves.
    """
    path, name = folder / "logs" / "wandb.id", folder.resolve().name
    if not path.exists():
        earlier = (folder / "logs" / "wandb").is_dir()  # begun by a release that took the folder's name
        write_atomic(path, name if earlier else f"{name}-{uuid.uuid4().hex[:8]}")
    return path.read_text(encoding="utf-8")


class WandB:
    """A run that Weights & Biases resumes under the same id when ours is resumed."""

    def __init__(self, folder: Path, name: str) -> None:
        import wandb

        self.table = wandb.Table
        self.run = wandb.init(
            project="terrella", name=name, id=wandb_id(folder), dir=str(folder / "logs"), resume="allow"
        )

    def write(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        self.run.log({f"{stage}/{name}": value for name, value in values.items()} | {f"{stage}/step": step})

    def show(self, name: str, step: int, table: Table) -> None:
        rows = [[cell if isinstance(cell, int | float | None) else str(cell) for cell in row] for row in table.rows]
        self.run.log({name: self.table(columns=table.columns, data=rows, allow_mixed_types=True), f"{name}/step": step})

    def close(self) -> None:
        """Send what is left, but do not wait for a network that is away: what is not sent lies in the run's logs
        (wandb sync).
        """
        ending = threading.Thread(target=self.run.finish, name="wandb", daemon=True)
        ending.start()
        ending.join(CLOSING_S)


class Prometheus:
    """The newest row of every stage as gauges at http://HOST:PORT/metrics, from a thread of the rank that writes the
    record.
    """

    def __init__(self, run_name: str) -> None:
        place = os.environ.get(PROMETHEUS_VARIABLE, "127.0.0.1:9464")
        host, _, port = place.rpartition(":")
        if not port.isdigit():
            raise ConfigError(f"{PROMETHEUS_VARIABLE}: '{place}' must be host:port")
        self.run_name, self.rows = run_name, dict[str, dict[str, float]]()
        sink = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = sink.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        try:
            self.web = ThreadingHTTPServer((host, int(port)), Handler)
        except (OSError, OverflowError) as error:  # taken, or no port at all
            raise ConfigError(
                f"sinks: prometheus cannot listen at '{place}' ({error}); set {PROMETHEUS_VARIABLE}=host:port"
            ) from error
        threading.Thread(target=self.web.serve_forever, name="prometheus", daemon=True).start()

    def write(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        self.rows = {**self.rows, stage: {"step": float(step), "record_time_seconds": time.time(), **numbers}}

    def show(self, name: str, step: int, table: Table) -> None:
        """Gauges are numbers alone."""

    def close(self) -> None:
        self.web.shutdown()
        self.web.server_close()

    def text(self) -> str:
        """All gauges in Prometheus' text format."""
        gauges: dict[str, list[str]] = {}
        for stage, values in self.rows.items():
            for name, value in values.items():
                gauge = "terrella_" + re.sub(r"\W", "_", name)
                labels = ",".join(
                    f"{key}={json.dumps(label)}" for key, label in (("run", self.run_name), ("stage", stage))
                )
                gauges.setdefault(gauge, []).append(f"{gauge}{{{labels}}} {value!r}")
        return "".join(
            f"# TYPE {gauge} gauge\n" + "".join(f"{line}\n" for line in lines)
            for gauge, lines in sorted(gauges.items())
        )


def open_sinks(names: list[SinkName], folder: Path, run_name: str) -> list[Sink]:
    """The sinks a recipe asks for; a missing package is named together with the way to install it."""
    sinks: list[Sink] = []
    for name in names:
        try:
            if name == "prometheus":
                sinks.append(Prometheus(run_name))
            else:
                sinks.append(TensorBoard(folder) if name == "tensorboard" else WandB(folder, run_name))
        except ImportError as error:
            raise ConfigError(
                f"sinks: '{name}' needs a package that is not installed ({error}); pip install {name}, or remove it"
            ) from error
    return sinks
