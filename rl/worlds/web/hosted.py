"""Web worlds that any thread may call: a browser belongs to the thread that started it, so their calls are carried
to a home thread, one of a pool.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from ....core.process import usable_cores, usable_memory
from ..base import Action, Snapshot, StepResult, WorldFault
from .templates import Step
from .world import WebConfig, WebWorld

PER_CORE = 4  # browsers: most of a step is waiting for frames and for sites
BROWSER_BYTES = 1 << 29  # of a Chromium with a few open pages
LIMIT = 12  # deadlines of the browser in one call: a step acts, looks and may have to open pages to judge
END_S = 20.0  # for the browsers' threads at the end of the process
LOOK_S = 0.25  # how often those who wait see whether the call in front is late


def browsers_here(cores: int, memory: int, ranks: int) -> int:
    """How many browsers one of several ranks of a machine may have."""
    return max(1, min(PER_CORE * cores, memory // BROWSER_BYTES) // ranks)


def call_limit_s(config: WebConfig) -> float:
    """How long a call may take from when it begins; a browser's own deadlines come first."""
    return LIMIT * config.deadline_s + (config.reset_deadline_s if config.reset_command else 0.0)


@dataclass(eq=False)
class _Call:
    work: Callable[[], Any]
    limit_s: float
    answer: Future[Any] = field(default_factory=Future)
    begun: float | None = None


class Home:
    """A thread, and with it a browser, that carries out the calls of its worlds one after another. When one of them
    does not return the thread is given up: those behind it get a fault at once, and new worlds live elsewhere.
    """

    def __init__(self) -> None:
        self.worlds: weakref.WeakSet[HostedWorld] = weakref.WeakSet()
        self.lost = ""
        self._waiting: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._now: _Call | None = None
        self._lock = threading.RLock()  # the end of another world, whenever memory is tidied up, asks for it too
        self.thread = threading.Thread(target=self._work, daemon=True, name="browser")
        self.thread.start()

    def submit(self, work: Callable[[], Any], limit_s: float) -> Future[Any]:
        """Have a call carried out when those in front of it are over."""
        call = _Call(work, limit_s)
        with self._lock:
            if self.lost:
                raise WorldFault(self.lost)
            self._waiting.put(call)
        return call.answer

    def ask(self, work: Callable[[], Any], limit_s: float) -> Any:
        """The result of a call, within its limit from when it begins."""
        answer = self.submit(work, limit_s)
        while not wait([answer], LOOK_S).done:
            self._give_up_if_late()
        return answer.result()

    def end(self) -> None:
        """Let the thread go when its calls are over."""
        self._waiting.put(None)

    def _give_up_if_late(self) -> None:
        with self._lock:
            now = self._now
            if now is None or now.begun is None or time.monotonic() - now.begun < now.limit_s or self.lost:
                return
            self.lost = f"web: a browser's thread did not return within {now.limit_s:g} s (deadline_s)"
            lost = [now]
            while not self._waiting.empty():
                lost += filter(None, [self._waiting.get()])
        for world in list(self.worlds):
            world.kill()
        for call in lost:
            with contextlib.suppress(Exception):  # it returned in this very moment
                call.answer.set_exception(WorldFault(self.lost))

    def _work(self) -> None:
        while not self.lost and (call := self._waiting.get()) is not None:
            call.begun = time.monotonic()
            self._now = call
            try:
                value, fault = call.work(), None
            except BaseException as error:
                value, fault = None, error
            self._now = None
            with contextlib.suppress(Exception):  # it was given up meanwhile
                call.answer.set_exception(fault) if fault is not None else call.answer.set_result(value)
            del call, value, fault


_homes: list[Home] = []
_choosing = threading.Lock()


@atexit.register
def _end_homes() -> None:
    """Threads that are still in a browser's library while Python is taken down would crash the process."""
    for home in _homes:
        home.end()
    end = time.monotonic() + END_S
    for home in _homes:
        home.thread.join(max(0.0, end - time.monotonic()))


def home_of(world: HostedWorld, browsers: int | None) -> Home:
    """The home with the fewest worlds; further ones are opened up to the number of browsers."""
    if browsers is None:
        browsers = browsers_here(usable_cores(), usable_memory(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    with _choosing:
        _homes[:] = [home for home in _homes if not home.lost]
        found = min(_homes, key=lambda home: len(home.worlds), default=None)
        if found is None or (found.worlds and len(_homes) < browsers):
            found = Home()
            _homes.append(found)
        found.worlds.add(world)
    return found


class HostedWorld(WebWorld):
    """A world on one of the home threads; those of one thread share a browser and take turns. `browsers` says how many
    there may be, None by the machine.
    """

    def __init__(self, *, browsers: int | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.home, self.limit_s = home_of(self, browsers), call_limit_s(self.config)

    def _at_home(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if threading.current_thread() is self.home.thread:
            return method(*arguments)
        return self.home.ask(lambda: method(*arguments), self.limit_s)

    def reset(self, seed: int, sample: int = 0) -> str:
        return self._at_home(super().reset, seed, sample)

    def open_task(self, record: Any, steps: tuple[Step, ...] = ()) -> str:
        return self._at_home(super().open_task, record, steps)

    def step(self, action: Action) -> StepResult:
        return self._at_home(super().step, action)

    def restore(self, snapshot: Snapshot) -> None:
        self._at_home(super().restore, snapshot)

    def close(self) -> None:
        self._at_home(super().close)

    def kill(self) -> None:
        """End the browser from outside, where its thread does not return."""
        process = getattr(self.backend, "process", None)
        if process is not None:
            process.kill()

    def __del__(self) -> None:
        """A world that nobody has any more gives its browser back."""
        backend = getattr(self, "backend", None)
        if backend is not None:
            with contextlib.suppress(WorldFault):  # its thread was given up, and its browser killed
                self.home.submit(backend.close, self.limit_s)
