"""Stages whose samplers lose their weights, in the pool's ranks. Helper module, not a test."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from terrella.core import run as runs
from terrella.launch.recipe import Recipe
from terrella.tests.parallel.pool import run_ranks


def run_with_losses(recipe: Recipe, folder: Path, losses: dict[int, int], world: int = 2) -> list[int]:
    """Run a recipe on `world` ranks. The samplers of the first leader are numbered as they are opened; one with an
    entry in `losses` loses its weights in that call of it. Returns how often each was sent its weights."""
    run, lease = runs.create(folder, recipe)
    job = {"path": str(folder), "token": run.token, "losses": losses}
    try:
        return run_ranks("terrella.tests.parallel.loss_jobs:work", world, share_gpu=True, **job)[0]
    finally:
        lease.release()


def work(path: str, token: str, losses: dict[int, int]) -> list[int]:
    """One rank's part of `terrella train`."""
    import torch.distributed as dist

    from terrella.launch import worker
    from terrella.rl.rollout import open as opening
    from terrella.rl.rollout.sampler import Unpublished

    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ |= {
        runs.LEASE_VARIABLE: token,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    sent: list[int] = []
    open_embedded = opening._open_embedded

    def forgetful(*args: Any) -> opening.OpenSampler:
        opened = open_embedded(*args)
        number, calls, lost = len(sent), 0, True
        sent.append(0)
        publish, generate = opened.publish, opened.sampler.generate
        assert publish is not None, "a sampler that shares the trainer's weights cannot lose them"

        def published(version: int) -> None:
            nonlocal lost
            publish(version)
            lost = False
            sent[number] += 1

        def generated(requests: list[Any]) -> list[Any]:
            nonlocal calls, lost
            calls += 1
            lost = lost or (rank == 0 and calls == losses.get(number))
            if lost:
                raise Unpublished("the sampler: its weights are lost")
            return generate(requests)

        opened.publish, opened.sampler.generate = published, generated  # type: ignore[method-assign]
        return opened

    opening._open_embedded = forgetful
    try:
        worker.run_stages(Path(path), rank, world, None)
    finally:
        opening._open_embedded = open_embedded
    return sent
