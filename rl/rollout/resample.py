"""Work on samples, repeated where servers lost weights that only all trainer ranks together can publish."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from ...core.mesh import Mesh
from ...data.trajectory import Trajectory
from .sampler import Sampler, Unpublished

log = logging.getLogger("terrella")
ATTEMPTS = 3

Played = tuple[list[Any], list[Trajectory]]  # episodes and what came of them
T = TypeVar("T")


def take_with_republish(
    mesh: Mesh, sampler: Sampler, take: Callable[[], Played], publish: Callable[[], None], where: str
) -> Played:
    """The episodes that a leader takes, and their trajectories on all ranks, as `make_with_republish`. Collective."""
    episodes: list[Any] = []

    def make() -> list[Trajectory]:
        nonlocal episodes
        episodes, played = take()
        return played

    trajectories = make_with_republish(mesh, sampler, make, publish, where)
    return episodes, trajectories  # those of the last attempt


def make_with_republish(
    mesh: Mesh, sampler: Sampler, make: Callable[[], T], publish: Callable[[], None], where: str
) -> T:
    """The leader's `make()`, on all of its peers. Where a leader's servers lost their weights, all ranks publish them
    and it is called again; what the journal kept is not sampled again. Collective.
    """
    recall = getattr(sampler, "recall", lambda: None)  # a journal has it

    def attempt(number: int) -> tuple[T] | None:
        try:
            return (make(),)
        except Unpublished as error:
            if number == ATTEMPTS or hasattr(sampler, "submit"):
                raise  # in a stream, everything in flight has failed
            log.warning("%s: %s; publishing them again and sampling anew", where, error)
            recall()
            return None

    made: tuple[T] | None = None
    for number in range(1, ATTEMPTS + 1):
        if made is None:
            made = mesh.from_leader(partial(attempt, number))
        if not any(mesh.gather(made is None, patient=True)):
            break
        publish()
    assert made is not None  # the last attempt returns it or raises
    return made[0]
