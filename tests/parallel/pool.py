"""One pool of four ranks for all tests of a session: gloo on CPU, NCCL where four GPUs are.

Starting ranks costs seconds (imports), building a world of 1, 2 or 4 of them costs little, so each test builds the
world it needs. Threads may ask for worlds of one rank at the same time: each gets a process of its own.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import multiprocessing as mp
import os
import tempfile
import threading
import time
import traceback
import uuid
import warnings
from typing import Any

SIZE = 4
_pool: Pool | None = None
_making = threading.Lock()


def run_ranks(target: str, world: int, deadline_s: float = 900.0, share_gpu: bool = False, **kwargs: Any) -> list[Any]:
    """Run `module:function(**kwargs)` on `world` ranks of one process group; returns each rank's result. They may
    `share_gpu`s.
    """
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() < world and not share_gpu:
        import pytest

        pytest.skip(f"{world} ranks need as many GPUs")
    global _pool
    with _making:
        if _pool is None or _pool.broken:
            _pool = Pool()
            atexit.register(_pool.stop)
        pool = _pool
    return pool.run(target, world, deadline_s, kwargs)


class Pool:
    def __init__(self) -> None:
        self.broken = False
        self.folder = tempfile.mkdtemp(prefix="terrella-ranks-")
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        self.busy = [threading.Lock() for _ in range(SIZE)]
        self.growing = threading.Lock()

    def grow(self, world: int) -> None:
        context = mp.get_context("spawn")
        for _ in range(len(self.pipes), world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, target: str, world: int, deadline_s: float, kwargs: dict[str, Any]) -> list[Any]:
        assert world <= SIZE, f"the pool has {SIZE} ranks"
        first = 0
        if world == 1:
            first = next(i for i, lock in enumerate(self.busy) if lock.acquire(blocking=False))
        elif not all(lock.acquire(timeout=deadline_s) for lock in self.busy[:world]):
            raise AssertionError(f"{target}: {world} ranks were not free within {deadline_s:.0f} s")
        try:
            return self._run(target, first, world, deadline_s, kwargs)
        finally:
            for lock in self.busy[first : first + world]:
                lock.release()

    def _run(self, target: str, first: int, world: int, deadline_s: float, kwargs: dict[str, Any]) -> list[Any]:
        """On the processes from `first` on, which are the caller's alone."""
        with self.growing:
            self.grow(first + world)
        pipes = self.pipes[first : first + world]
        store = os.path.join(self.folder, uuid.uuid4().hex)
        for rank, pipe in enumerate(pipes):
            pipe.send((target, rank, world, store, kwargs))
        results: list[Any] = [None] * world
        waiting = set(range(world))
        end = time.monotonic() + deadline_s
        errors = []
        while waiting and time.monotonic() < end:
            for rank in sorted(waiting):
                if pipes[rank].poll(0.005):
                    try:
                        ok, value = pipes[rank].recv()
                    except EOFError:
                        ok, value = False, "process died"
                    waiting.discard(rank)
                    if ok:
                        results[rank] = value
                    else:
                        errors.append(f"rank {rank}: {value}")
                        end = min(end, time.monotonic() + 5.0)  # peers may now wait for this rank
        if waiting or errors:
            self.stop()
            raise AssertionError(
                "\n".join(errors) or f"{target}: ranks {sorted(waiting)} did not finish in {deadline_s:.0f} s"
            )
        return results

    def stop(self) -> None:
        self.broken = True
        for process in self.processes:
            process.kill()
            process.join(5)


def _serve(pipe: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    from terrella.core.mcore import setup, shared_gpu, shim

    if not torch.cuda.is_available():
        shim.install()
    elif torch.cuda.device_count() < SIZE:
        shared_gpu.install()  # before Megatron keeps what it replaces
    while True:
        try:
            target, rank, world, store, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            setup.start_process_group(10.0, init_method=f"file://{store}", rank=rank, world=world)
            module, function = target.split(":")
            result = getattr(importlib.import_module(module), function)(**kwargs)
            setup.stop_parallel()
            dist.barrier()
            dist.destroy_process_group()
            pipe.send((True, result))
            gc.collect()  # groups that cycles of objects keep have threads, which wake up a hundred times a second
        except BaseException:
            pipe.send((False, traceback.format_exc()))
            return
