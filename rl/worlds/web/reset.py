"""Sites elsewhere keep what an episode did to them: a command of the user's brings them back, and few episodes share
a site or account.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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


def parts(
    seats: Sequence[Seat], task_of: Callable[[Seat], WebTask], at_once: int, per_site: int, per_account: int
) -> list[list[Seat]]:
    """The seats in parts that may be open together: at most `at_once`, `per_site` on one site and `per_account` as one
    account (0 for any number). Every seat goes into the first part that has room, so without limits the order stays."""
    found: list[tuple[list[Seat], Counter[str], Counter[str]]] = []
    first = 0  # parts before it are full
    for seat in seats:
        task = task_of(seat)
        account = account_of(task)
        for held, sites, accounts in found[first:]:
            crowded = per_site and any(sites[s] >= per_site for s in task.sites)
            taken = per_account and account and accounts[account] >= per_account
            if len(held) < at_once and not crowded and not taken:
                break
        else:
            held, sites, accounts = [], Counter[str](), Counter[str]()
            found.append((held, sites, accounts))
        held.append(seat)
        sites.update(task.sites)
        accounts[account] += 1
        while first < len(found) and len(found[first][0]) >= at_once:
            first += 1
    return [held for held, _, _ in found]
