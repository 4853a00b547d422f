"""Published training figures. One constant of the model is fitted on those with experts, and judged on rows that its
fit left out; all the others were fitted elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import yaml

from ...models.geometry import GEOMETRIES, flops_per_token
from .layout import Layout, Work
from .machine import GPUS, PUBLISHED, Constants
from .rl import RlStep, Rollout, rl_step
from .timing import fitted, step_time


@dataclass(frozen=True)
class Published:
    """One figure: tokens per second and GPU, and the layout it was published with, or that we assume."""

    group: Literal["dense", "experts", "other GPUs", "other software"]
    model: str
    precision: Literal["bf16", "fp8"]
    layout: Layout
    sequence: int
    batch: int
    figure: float  # tokens per second and GPU; below 1: MFU of the bf16 peak
    source: str
    assumed: str = ""  # what the source does not say
    gpu: str = "h100"

    @property
    def work(self) -> Work:
        return Work(GEOMETRIES[self.model], self.sequence, self.batch, self.precision, own=False)

    @property
    def tokens_per_s(self) -> float:
        if self.figure >= 1:
            return self.figure
        return self.figure * GPUS[self.gpu].bf16 / flops_per_token(self.work.model, self.sequence)

    def predicted(self, constants: Constants | None = None) -> float:
        return step_time(self.work, self.layout, GPUS[self.gpu], constants).tokens_per_s

    def error(self, constants: Constants | None = None) -> float:
        """Predicted over published, less one."""
        return self.predicted(constants) / self.tokens_per_s - 1.0


@dataclass(frozen=True)
class PublishedRl:
    """Seconds of a whole step of RL by other software, whose samplers take turns with its trainer."""

    model: str
    layout: Layout
    rollout: Rollout
    seconds: float
    source: str

    def predicted(self) -> RlStep:
        work = Work(GEOMETRIES[self.model], self.rollout.most, self.rollout.samples, own=False)
        return rl_step(work, self.layout, self.rollout, GPUS["h100"])


_FILE = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
ROWS = tuple(
    Published(group, model, precision, Layout(**layout), *rest)
    for group, model, precision, layout, *rest in _FILE["rows"]
)
RL_ROWS = tuple(
    PublishedRl(model, Layout(**layout), Rollout(**rollout), *rest) for model, layout, rollout, *rest in _FILE["rl"]
)

# model, GPUs, their kind, seconds of a step, of sampling, of training, source; how long the answers were is not said
VERL_ROWS = tuple((*row,) for row in _FILE["verl"])


def mean_error(group: str | None = None, rows: Sequence[Published] = ROWS, constants: Constants | None = None) -> float:
    """Mean absolute error of a group, or of all figures."""
    errors = [abs(p.error(constants)) for p in rows if group in (None, p.group)]
    return sum(errors) / len(errors)


def fit(rows: Sequence[Published]) -> Constants:
    """The constants with the one that figures decide at its best on these rows, by the mean absolute error."""
    (name,) = PUBLISHED
    tried = [replace(fitted(), **{name: tenths * 1e-4}) for tenths in range(100)]
    return min(tried, key=lambda constants: mean_error(None, rows, constants))


@cache
def left_out(by: Literal["row", "model"]) -> float:
    """Mean absolute error of the rows with experts, each predicted by constants that were fitted without it, or
    without all rows of its model.
    """
    rows = [p for p in ROWS if p.group == "experts"]
    errors = []
    for p in rows:
        others = [q for q in rows if (q is not p if by == "row" else q.model != p.model)]
        errors.append(abs(p.error(fit(others))))
    return sum(errors) / len(errors)
