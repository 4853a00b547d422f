"""Published training figures on H100, held out: no constant of the model was fitted on them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from ...models.geometry import GEOMETRIES, flops_per_token
from .layout import Layout, Work
from .machine import GPUS
from .timing import step_time


@dataclass(frozen=True)
class Published:
    """One figure: tokens per second and GPU, and the layout it was published with, or that we assume."""

    group: Literal["dense", "experts", "other software"]
    model: str
    precision: Literal["bf16", "fp8"]
    layout: Layout
    sequence: int
    batch: int
    figure: float  # tokens per second and GPU; below 1: MFU of the bf16 peak
    source: str
    assumed: str = ""  # what the source does not say

    @property
    def work(self) -> Work:
        return Work(GEOMETRIES[self.model], self.sequence, self.batch, self.precision, own=False)

    @property
    def tokens_per_s(self) -> float:
        if self.figure >= 1:
            return self.figure
        return self.figure * GPUS["h100"].bf16 / flops_per_token(self.work.model, self.sequence)

    def predicted(self) -> float:
        return step_time(self.work, self.layout, GPUS["h100"]).tokens_per_s

    def error(self) -> float:
        """Predicted over published, less one."""
        return self.predicted() / self.tokens_per_s - 1.0


def _read(path: Path) -> tuple[Published, ...]:
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))["rows"]
    return tuple(
        Published(group, model, precision, Layout(**layout), *rest) for group, model, precision, layout, *rest in rows
    )


HELD_OUT = _read(Path(__file__).with_name("published.yaml"))


def mean_error(group: str | None = None) -> float:
    """Mean absolute error of a group, or of all held-out figures."""
    errors = [abs(p.error()) for p in HELD_OUT if group in (None, p.group)]
    return sum(errors) / len(errors)
