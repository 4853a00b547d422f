"""What Ray's actors do in the tests: play whole episodes of a real world, and reduce over gloo."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from terrella.core.rng import uniform
from terrella.rl.worlds.tasks import load_tasks


def until(what: str, condition: Callable[[], bool], deadline_s: float = 300.0) -> None:
    """Wait for a condition, with a deadline that says what did not come."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"no {what} after {deadline_s:.0f} s")
        time.sleep(0.05)


class Player:
    """A world worker: random play of one seed of a task. While the folder `gate` is there, calls leave a file in it and wait."""

    def __init__(self, tag: str, gate: str = "", hold_s: float = 0.0) -> None:
        self.task, self.gate, self.hold_s = load_tasks()[tag], gate, hold_s

    def play(self, seed: int) -> tuple[int, float]:
        if seed < 0:
            raise ValueError("a seed is not negative")
        world = self.task.make()
        world.reset(seed)
        total = 0.0
        for turn in range(self.task.max_actions):
            result = world.step(1 + int(uniform(seed, turn) * 4))
            total += result.reward
            if result.done:
                break
        if self.gate and Path(self.gate).exists():
            (Path(self.gate) / f"call-{seed}").touch()
            until("open gate", lambda: not Path(self.gate).exists(), self.hold_s)
        return seed, total


def all_reduce(folder: str = "", hold_s: float = 0.0) -> float:
    """Sum of the ranks over gloo; then say so in a file and hold on, so that a node can be taken away meanwhile."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    value = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(value)
    if folder:
        (Path(folder) / f"rank-{dist.get_rank()}").touch()
    time.sleep(hold_s)
    return float(value)
