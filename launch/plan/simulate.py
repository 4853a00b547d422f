"""A long run on thousands of GPUs: the step's time at that size, failures at the published rate, and how often to
save.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from ...models.geometry import count
from .layout import Layout, Work
from .machine import Constants, Gpu
from .timing import StepTime, step_time

# Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100
FAILURES_PER_GPU_DAY = 419 / 54 / 16384
REQUEUE_S = 480.0  # from a failure to the next start: noticing it, a place in the queue, health checks; assumed
START_S = 60.0  # processes, imports, groups of ranks, first kernels; assumed
SERVERS_S = 120.0  # until a vLLM server answers; assumed
STORAGE = 2e9  # bytes/s that one node writes to the shared file system, or reads from it; assumed
PAUSE_S = 5.0  # of training while a checkpoint is copied out of the GPUs, on top of writing it; assumed


@dataclass(frozen=True)
class Outlook:
    """What a long run gets done."""

    step: StepTime
    save_s: float
    interval_s: float
    failures: float
    efficiency: float  # productive share, by the formula
    simulated: float  # the same share, by playing failures


def save_seconds(work: Work, gpu: Gpu, gpus: int) -> float:
    """Writing weights and optimizer state, all nodes at once."""
    return PAUSE_S + 14.0 * count(work.model).total / (STORAGE * max(1, gpus // gpu.gpus_per_node))


def start_seconds(work: Work, gpu: Gpu, layout: Layout, *, served: bool = False) -> float:
    """From the processes to the first step: each copy of the model is read once, all nodes at once, and samplers start
    beside it.
    """
    nodes = max(1, layout.gpus // gpu.gpus_per_node)
    return START_S + max(2.0 * count(work.model).total * layout.data / (STORAGE * nodes), SERVERS_S if served else 0.0)


def restart_seconds(work: Work, gpu: Gpu, layout: Layout, *, served: bool = False) -> float:
    """From a failure to where training goes on: a new start, and the optimizer's state, of which each rank reads its
    share.
    """
    nodes = max(1, layout.gpus // gpu.gpus_per_node)
    state = 12.0 * count(work.model).total / (STORAGE * nodes)
    return REQUEUE_S + start_seconds(work, gpu, layout, served=served) + state


def best_interval(save_s: float, between_failures_s: float) -> float:
    """The interval between checkpoints that loses least (Young's optimum)."""
    return math.sqrt(2.0 * save_s * between_failures_s)


def lost_share(interval_s: float, save_s: float, between_failures_s: float, restart_s: float) -> float:
    """Share of the time lost to saving, to repeating work and to restarting."""
    return save_s / (interval_s + save_s) + (interval_s / 2 + restart_s) / between_failures_s


def play(
    interval_s: float, save_s: float, between_failures_s: float, restart_s: float, days: float, seed: int = 0
) -> float:
    """Productive share of a run whose failures fall at random; each throws away what was not saved."""
    rng = random.Random(seed)
    end, now, saved = days * 86400.0, 0.0, 0.0
    strike = rng.expovariate(1.0 / between_failures_s)
    while now < end:
        done_at = now + interval_s + save_s
        if strike < done_at:
            now = strike + restart_s
            strike = now + rng.expovariate(1.0 / between_failures_s)
        else:
            now, saved = done_at, saved + interval_s
    return saved / now


def outlook(work: Work, layout: Layout, gpu: Gpu, days: float = 54.0, constants: Constants | None = None) -> Outlook:
    """One size of cluster, saving at the optimum interval."""
    step = step_time(work, layout, gpu, constants)
    between = 86400.0 / (FAILURES_PER_GPU_DAY * layout.gpus)
    save, restart = save_seconds(work, gpu, layout.gpus), restart_seconds(work, gpu, layout)
    interval = max(step.total, best_interval(save, between))
    return Outlook(
        step=step,
        save_s=save,
        interval_s=interval,
        failures=days * 86400.0 / between,
        efficiency=1.0 - lost_share(interval, save, between, restart),
        simulated=play(interval, save, between, restart, days),
    )
