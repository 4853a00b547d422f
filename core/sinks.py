"""Optional sinks beside metrics.jsonl: TensorBoard, Weights & Biases, Prometheus. The file stays the record; a sink only mirrors it."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, Protocol

from .errors import ConfigError

SinkName = Literal["tensorboard", "wandb", "prometheus"]
PROMETHEUS_VARIABLE = "TERRELLA_PROMETHEUS"  # host:port to listen at; the default is this machine alone, port 9464


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


class Prometheus:
    """The newest row of every stage as gauges at http://HOST:PORT/metrics, from a thread of the rank that writes the record."""

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
        except OSError as error:
            raise ConfigError(f"sinks: prometheus cannot listen at '{place}' ({error}); set {PROMETHEUS_VARIABLE}=host:port") from error
        threading.Thread(target=self.web.serve_forever, name="prometheus", daemon=True).start()

    def write(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        self.rows = {**self.rows, stage: {"step": float(step), "record_time_seconds": time.time(), **numbers}}

    def text(self) -> str:
        """All gauges in Prometheus' text format."""
        gauges: dict[str, list[str]] = {}
        for stage, values in self.rows.items():
            for name, value in values.items():
                gauge = "terrella_" + re.sub(r"\W", "_", name)
                labels = ",".join(f"{key}={json.dumps(label)}" for key, label in (("run", self.run_name), ("stage", stage)))
                gauges.setdefault(gauge, []).append(f"{gauge}{{{labels}}} {value!r}")
        return "".join(f"# TYPE {gauge} gauge\n" + "".join(f"{line}\n" for line in lines) for gauge, lines in sorted(gauges.items()))


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
