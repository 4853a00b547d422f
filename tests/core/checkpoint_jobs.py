"""What ranks run in the checkpoint tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from terrella.tests.parallel import jobs


def _states(engine: Any) -> dict[str, torch.Tensor]:
    """Bits of this rank's weights and optimizer state."""
    from terrella.core.mcore import optimizer as adam

    out = {p.name: p.param.detach().cpu().clone() for p in engine.local_parameters()}
    names = {id(p.param): p.name for p in engine.local_parameters()}
    for part in adam.state_parts(engine.optimizer):
        for kind in adam.MOMENTS:
            out[f"{names[id(part.param)]}/{kind}/{part.start}"] = part.state[kind].cpu().clone()
    return out


def _steps(engine: Any, first: int, count: int) -> list[tuple[float, float]]:
    out = []
    loss = jobs.fused_loss if engine.precision.fp8_head else jobs.cross_entropy
    for i in range(first, first + count):
        result = engine.step(jobs.share(engine, jobs.batches(4, seed=100 + i)), loss)
        assert not result.skipped
        out.append((result.metrics["loss"], result.grad_norm))
    return out


def train_and_save(
    folder: str, parallel: dict, at: int, total: int, precision: str = "fp32", wait: bool = True
) -> dict[str, Any]:
    """Train `total` steps and save after `at` of them; returns the trace and the final states."""
    engine = jobs.make_engine(parallel, precision=precision)
    trace = _steps(engine, 0, at)
    engine.save(Path(folder), {"position": at}, wait=wait)
    trace += _steps(engine, at, total - at)
    engine.finish_save()
    return {"trace": trace, "states": _states(engine)}


def resume(folder: str, parallel: dict, total: int, precision: str = "fp32") -> dict[str, Any]:
    """Load in a fresh engine whose own weights were first moved elsewhere, and go on to `total` steps."""
    engine = jobs.make_engine(parallel, precision=precision)
    _steps(engine, 50, 1)
    extra = engine.load(Path(folder))
    loaded = {name: value.cpu().clone() for name, value in engine.parameters()}
    trace = _steps(engine, extra["position"], total - extra["position"])
    return {"trace": trace, "states": _states(engine), "loaded": loaded, "step": engine.steps}


def resave(folder: str, other: str, parallel: dict, kind: str = "dense") -> None:
    """Load under one layout and save again."""
    engine = jobs.make_engine(parallel, **jobs.KINDS[kind])
    engine.save(Path(other), engine.load(Path(folder)))


def bytes_read(folder: str, parallel: dict, weights_only: bool = False) -> dict[str, int]:
    """What this rank reads of a checkpoint when it loads it."""
    from terrella.core import checkpoint

    engine = jobs.make_engine(parallel)
    readers, opened = [], checkpoint.open_verified
    checkpoint.open_verified = lambda path: readers.append(opened(path)) or readers[-1]  # type: ignore[func-returns-value]
    try:
        engine.load(Path(folder), weights_only=weights_only)
    finally:
        checkpoint.open_verified = opened
    own = sum(p.param.numel() * 4 for p in engine.local_parameters())
    return {"read": sum(reader.bytes_read for reader in readers), "own": own}


def train_experts(folder: str, parallel: dict) -> None:
    """Two steps of a model with experts, then a checkpoint."""
    engine = jobs.make_engine(parallel, **jobs.KINDS["moe"])
    _steps(engine, 0, 2)
    engine.save(Path(folder), {"position": 2})


def generator_after(folder: str, parallel: dict) -> torch.Tensor:
    """The state of torch's generator, which was somewhere else, after loading."""
    engine = jobs.make_engine(parallel)
    torch.manual_seed(123)
    engine.load(Path(folder))
    return torch.get_rng_state()


def load_error(folder: str, parallel: dict) -> str:
    """The message of the error that loading gives."""
    from terrella.core.errors import TerrellaError

    engine = jobs.make_engine(parallel)
    try:
        engine.load(Path(folder))
    except TerrellaError as error:
        return str(error)
    return ""


def save_without_space_on(folder: str, full: int) -> tuple[str, float]:
    """Save while one rank may write no more than a kilobyte to a file; returns what the save said, and after how
    long.
    """
    import resource
    import time

    import torch.distributed as dist

    from terrella.core.errors import StorageError

    engine = jobs.make_engine({})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    begun = time.monotonic()
    try:
        if dist.get_rank() == full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
        engine.save(Path(folder), {})
    except StorageError as error:
        return str(error), time.monotonic() - begun
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "saved", time.monotonic() - begun


def save_slowly(folder: str, slow: int) -> None:
    """Save where one rank's file takes longer than a collective may."""
    import time
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout

    from terrella.core import checkpoint

    engine, write = jobs.make_engine({}), checkpoint.write_shard

    def slowly(*args: Any) -> dict[str, Any]:
        time.sleep(9.0 * (dist.get_rank() == slow))
        return write(*args)

    dist.barrier()
    _set_pg_timeout(timedelta(seconds=6))
    checkpoint.write_shard = slowly
    try:
        engine.save(Path(folder), {})
    finally:
        checkpoint.write_shard = write
