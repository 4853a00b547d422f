"""A long run on thousands of GPUs: the step's time at that size, failures at the published rate, and how often to
save.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass

from ...models.geometry import count
from .layout import Layout, Work
from .machine import Gpu
from .timing import StepTime, step_time

# Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100
FAILURES_PER_GPU_DAY = 419 / 54 / 16384
RESTART_S = 600.0  # requeue, health checks, start, load; assumed
STORAGE = 2e9  # bytes/s that one node writes to the shared file system; assumed
PAUSE_S = 5.0  # of training while a checkpoint is copied out of the GPUs, on top of writing it; assumed


@dataclass(frozen=True)
class Outlook:
    """What a run of `days` on `gpus` GPUs gets done."""

    gpus: int
    step: StepTime
    save_s: float
    interval_s: float
    failures: float
    efficiency: float  # productive share, by the formula
    simulated: float  # the same share, by playing failures


def save_seconds(work: Work, gpu: Gpu, gpus: int) -> float:
    """Writing weights and optimizer state, all nodes at once."""
    return PAUSE_S + 14.0 * count(work.model).total / (STORAGE * max(1, gpus // gpu.gpus_per_node))


def best_interval(save_s: float, between_failures_s: float) -> float:
    """The interval between checkpoints that loses least (Young's optimum)."""
    return math.sqrt(2.0 * save_s * between_failures_s)


def lost_share(interval_s: float, save_s: float, between_failures_s: float, restart_s: float = RESTART_S) -> float:
    """Share of the time lost to saving, to repeating work and to restarting."""
    return save_s / (interval_s + save_s) + (interval_s / 2 + restart_s) / between_failures_s


def play(interval_s: float, save_s: float, between_failures_s: float, days: float, seed: int = 0) -> float:
    """Productive share of a run whose failures fall at random; each throws away what was not saved."""
    rng = random.Random(seed)
    end, now, saved, useful = days * 86400.0, 0.0, 0.0, 0.0
    failures = [rng.expovariate(1.0 / between_failures_s)]
    while now < end:
        strike = heapq.heappop(failures)
        left = interval_s - (useful - saved)
        done_at = now + left + save_s
        if strike < done_at:
            now, useful = strike + RESTART_S, saved
            heapq.heappush(failures, now + rng.expovariate(1.0 / between_failures_s))
        else:
            now, useful = done_at, useful + left
            saved = useful
            heapq.heappush(failures, strike)
    return saved / now


def outlook(work: Work, layout: Layout, gpu: Gpu, days: float = 54.0) -> Outlook:
    """One size of cluster, saving at the optimum interval."""
    step = step_time(work, layout, gpu)
    between = 86400.0 / (FAILURES_PER_GPU_DAY * layout.gpus)
    save = save_seconds(work, gpu, layout.gpus)
    interval = max(step.total, best_interval(save, between))
    return Outlook(
        gpus=layout.gpus,
        step=step,
        save_s=save,
        interval_s=interval,
        failures=days * 86400.0 / between,
        efficiency=1.0 - lost_share(interval, save, between),
        simulated=play(interval, save, between, days),
    )
