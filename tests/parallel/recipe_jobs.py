"""What the pool's ranks run of a recipe: stages at a layout, with every gradient of every optimizer step. Helper
module, not a test.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from terrella.core import run as runs
from terrella.core.config import ParallelConfig
from terrella.launch.recipe import Recipe
from terrella.launch.settings.base import OnPolicy
from terrella.launch.settings.verbs import Collect
from terrella.tests.parallel.pool import run_ranks


def run_case(
    recipe: Recipe,
    folder: Path,
    world: int = 1,
    parallel: dict[str, Any] | None = None,
    source: Path | None = None,
    stage: str | None = None,
    samples: Path | None = None,
    last_bits: bool = False,
) -> list[dict[str, Any]]:
    """Run a recipe in a folder of the tests', or one `stage` of it on what the run `source` left before it, with the
    samples that the run `samples` kept. Returns every optimizer step of every engine, in order: metrics, norm,
    gradients, the weights after it, and how many engines were built that only score. With `last_bits` the weights' last
    bits are changed before every step."""
    recipe = replace(
        recipe,
        ranks=world,
        parallel=ParallelConfig(**(parallel or {})),
        stages=[_kept(s, samples) for s in recipe.stages],
    )
    run, lease = runs.create(folder, recipe)
    if source is not None:
        _begin(folder, source, recipe, str(stage))
    job = {"path": str(folder), "token": run.token, "until": stage, "inside": str(folder.parent.parent)}
    job["last_bits"] = last_bits
    try:
        return run_ranks("terrella.tests.parallel.recipe_jobs:work", world, share_gpu=True, **job)[0]
    finally:
        lease.release()


def _kept(stage: Any, samples: Path | None) -> Any:
    """Stages that ask a model keep its samples, or replay those of another run."""
    if not isinstance(stage, OnPolicy) and not (isinstance(stage, Collect) and stage.model is not None):
        return stage
    journal = str(samples / "stages" / stage.name / "journal") if samples else None
    return replace(stage, rollouts=replace(stage.rollouts, keep_samples=True, replay=journal))


def _begin(folder: Path, source: Path, recipe: Recipe, stage: str) -> None:
    """A run that is about to start `stage`: everything before it as `source` has it."""
    own = shutil.ignore_patterns("lease*", ".lease*", "logs", "config.yaml", "environment.json")
    shutil.copytree(source, folder, ignore=own, dirs_exist_ok=True)
    names = [s.name for s in recipe.stages]
    for name in names[names.index(stage) :]:
        (folder / "stages" / f"{name}.json").unlink(missing_ok=True)
        for left in (
            folder / "stages" / name,
            folder / "checkpoints" / name,
            folder / "checkpoints" / f"{name}-critic",
        ):
            shutil.rmtree(left, ignore_errors=True)


def work(path: str, token: str, until: str | None, inside: str, last_bits: bool = False) -> list[dict[str, Any]]:
    """One rank's part of `terrella train`, with the engine's steps watched."""
    import torch
    import torch.distributed as dist

    from terrella.core.engine import Engine
    from terrella.launch import worker
    from terrella.tests.rl.rollout.routing_jobs import Watch

    os.chdir(inside)  # what the cases read lies there
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ |= {
        runs.LEASE_VARIABLE: token,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    seen: list[dict[str, Any]] = []
    accumulate, step, init = Engine._accumulate, Engine._step, Engine.__init__
    frozen = 0  # engines that can only score

    def change_last_bits(engine: Engine) -> None:
        numbers = torch.Generator().manual_seed(len(seen))
        for chunk in engine.chunks:
            for parameter in chunk.parameters():
                parameter.data *= 1 + 2.0**-23 * (2 * torch.rand(parameter.shape, generator=numbers) - 1)

    def watched_init(self: Engine, *args: Any, **options: Any) -> None:
        nonlocal frozen
        init(self, *args, **options)
        frozen += self.optimizer is None

    def watched_accumulate(engine: Engine, *args: Any) -> Any:
        if last_bits:
            change_last_bits(engine)
        watch = Watch(engine) if getattr(engine.chunks[0], "routes", False) else None
        result = accumulate(engine, *args)
        gradients = {name: value.cpu().clone() for name, value in engine.gradients()}
        seen.append({"gradients": gradients if rank == 0 else {}, "frozen": frozen})
        if watch is not None:
            watch.end()
            seen[-1] |= {"replayed": watch.tokens, "misrouted": watch.wrong}
        return result

    def watched_step(engine: Engine, *args: Any) -> Any:
        result = step(engine, *args)
        weights = {name: value.cpu().clone() for name, value in engine.parameters()}
        seen[-1] |= {"norm": result.grad_norm, "metrics": result.metrics, "weights": weights if rank == 0 else {}}
        return result

    Engine._accumulate, Engine._step, Engine.__init__ = watched_accumulate, watched_step, watched_init
    try:
        worker.run_stages(Path(path), rank, world, until)
    finally:
        Engine._accumulate, Engine._step, Engine.__init__ = accumulate, step, init
    return seen if rank == 0 else []
