"""What Ray's actors do in the tests: play whole episodes of a real world, and reduce over gloo."""

from __future__ import annotations

import time

from terrella.core.rng import uniform
from terrella.rl.worlds.tasks import load_tasks


class Player:
    """A world worker: random play of one seed of a task."""

    def __init__(self, tag: str, slow_s: float = 0.0) -> None:
        self.task, self.slow_s = load_tasks()[tag], slow_s

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
        time.sleep(self.slow_s)
        return seed, total


def all_reduce(hold_s: float = 0.0) -> float:
    """Sum of the ranks over gloo; then hold on, so that a node can be taken away meanwhile."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    value = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(value)
    time.sleep(hold_s)
    return float(value)
