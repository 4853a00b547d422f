"""A world in a process of its own, for worlds that are slow or may hang: every call has a deadline, and a late process is killed."""

from __future__ import annotations

import multiprocessing as mp
from typing import Any

from .worlds.base import Action, Snapshot, StepResult, World, WorldFault
from .worlds.tasks import Task


def _serve(task: Task, pipe: Any) -> None:
    world = task.make()
    while True:
        method, args = pipe.recv()
        try:
            value = getattr(world, method)(*args)
            pipe.send((value, world.action_words, None))
        except Exception as error:
            pipe.send((None, None, f"{type(error).__name__}: {error}"))


class ProcessWorld(World):
    """The task's world behind a pipe. After a fault the process is gone; make a new one."""

    name = "process"

    def __init__(self, task: Task, deadline_s: float = 60.0) -> None:
        self.task, self.deadline_s = task, deadline_s
        self.grid_words = task.make().grid_words
        context = mp.get_context("fork" if "fork" in mp.get_all_start_methods() else "spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(task, theirs), daemon=True)  # type: ignore[attr-defined]
        self.process.start()
        theirs.close()

    def _call(self, method: str, *args: Any) -> Any:
        try:
            self.pipe.send((method, args))
            if not self.pipe.poll(self.deadline_s):
                self.close()
                raise WorldFault(f"{self.task.name}: {method} did not finish within {self.deadline_s:g} s; its process was killed")
            value, words, error = self.pipe.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise WorldFault(f"{self.task.name}: {method}: the world's process died") from error
        if error is not None:
            raise WorldFault(f"{self.task.name}: {method}: {error}")
        self.action_words = words
        return value

    def reset(self, seed: int, sample: int = 0) -> str:
        return self._call("reset", seed, sample)

    def step(self, action: Action) -> StepResult:
        return self._call("step", action)

    def render(self, mode: str = "text") -> str:
        return self._call("render", mode)

    def snapshot(self) -> Snapshot:
        return self._call("snapshot")

    def restore(self, snapshot: Snapshot) -> None:
        self._call("restore", snapshot)

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join(5)
        self.pipe.close()
