"""Sites elsewhere keep what an episode did to them: a command of the user's brings them back, and few episodes share
a site or account.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from ..base import WorldFault
from .tasks import WebTask

Seat = TypeVar("Seat")
_clean: set[tuple[tuple[str, ...], str]] = set()  # (command, site) that nobody has acted on since the command ran


def run_reset(command: Sequence[str], sites: Iterable[str], task_id: str, deadline_s: float) -> None:
    """Run the user's command, if there is one. One that fails, or does not end in time, is a fault of the world: its
    episode is Invalid.
    """
    if not command:
        return
    known = {**os.environ, "TERRELLA_SITES": ",".join(sites), "TERRELLA_TASK": task_id}
    try:
        done = subprocess.run(
            list(command), env=known, capture_output=True, text=True, timeout=deadline_s, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WorldFault(
            f"web: the reset command {command[0]} did not end well: {error} (reset_command, reset_deadline_s)"
        ) from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise WorldFault(
            f"web: the reset command {command[0]} ended with {done.returncode}: {' '.join(said)[:200]} (reset_command)"
        )


def reset_episode(command: Sequence[str], sites: Sequence[str], task_id: str, deadline_s: float) -> None:
    """Bring a task's sites back, unless nobody has acted on them since: to look at a first page costs no reset."""
    marks = {(tuple(command), site) for site in sites}
    if command and not marks <= _clean:
        run_reset(command, sites, task_id, deadline_s)
        _clean.update(marks)


def acted_on(command: Sequence[str], sites: Sequence[str]) -> None:
    """Note that an episode has acted on its sites."""
    if command:
        _clean.difference_update((tuple(command), site) for site in sites)


def account_of(task: WebTask) -> str:
    """Who plays a task: its storage state, or the login forms of its sites; none without a login."""
    return (task.storage_state or "+".join(task.sites)) if task.require_login else ""


@dataclass(frozen=True)
class Shares:
    """How many episodes may be open together: in all, on one site, and as one account (0 for any number)."""

    at_once: int
    per_site: int = 0
    per_account: int = 0


class Opened:
    """The episodes that are open together."""

    def __init__(self, shares: Shares) -> None:
        self.shares, self.count = shares, 0
        self.sites, self.accounts = Counter[str](), Counter[str]()

    def fits(self, task: WebTask) -> bool:
        """Whether a further one, of this task, may be opened."""
        shares, account = self.shares, account_of(task)
        crowded = shares.per_site and any(self.sites[site] >= shares.per_site for site in task.sites)
        taken = shares.per_account and account and self.accounts[account] >= shares.per_account
        return self.count < shares.at_once and not crowded and not taken

    def add(self, task: WebTask, change: int = 1) -> None:
        """Count a task in, or with -1 out."""
        self.count += change
        for site in task.sites:
            self.sites[site] += change
        self.accounts[account_of(task)] += change


def parts(seats: Sequence[Seat], task_of: Callable[[Seat], WebTask], shares: Shares) -> list[list[Seat]]:
    """The seats in parts that may be open together. Every seat goes into the first part that has room, so without
    limits the order stays."""
    found: list[tuple[list[Seat], Opened]] = []
    first = 0  # parts before it are full
    for seat in seats:
        task = task_of(seat)
        place = next((part for part in found[first:] if part[1].fits(task)), None)
        if place is None:
            place = [], Opened(shares)
            found.append(place)
        place[0].append(seat)
        place[1].add(task)
        while first < len(found) and found[first][1].count >= shares.at_once:
            first += 1
    return [held for held, _ in found]


class Room:
    """The same for episodes that begin and end at any time, in any rollout of the process: who does not fit waits in
    line, and the first that fits goes in.
    """

    def __init__(self, shares: Shares) -> None:
        self._opened, self._lock = Opened(shares), threading.RLock()
        self._line: list[tuple[WebTask, Future[None]]] = []

    @asynccontextmanager
    async def seat(self, task: WebTask) -> AsyncIterator[None]:
        """Be open within this block; before it, wait until others have ended. All of them end by deadlines."""
        entered: Future[None] = Future()
        with self._lock:
            self._line.append((task, entered))
            self._admit()
        try:
            await asyncio.wrap_future(entered)
        except BaseException:
            if not entered.cancel():  # it was let in meanwhile
                self._leave(task)
            raise
        try:
            yield
        finally:
            self._leave(task)

    def _leave(self, task: WebTask) -> None:
        with self._lock:
            self._opened.add(task, -1)
            self._admit()

    def _admit(self) -> None:
        line, self._line = self._line, []
        for task, entered in line:
            if not self._opened.fits(task):
                self._line.append((task, entered))
            elif entered.set_running_or_notify_cancel():
                self._opened.add(task)
                entered.set_result(None)
