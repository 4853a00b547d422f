"""What is made of samples, made anew where servers lost the weights that only all ranks of the trainer can send."""

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


def take_or_retake(
    mesh: Mesh, sampler: Sampler, take: Callable[[], Played], publish: Callable[[], None], where: str
) -> Played:
    """The episodes that a leader takes, and their trajectories on all ranks, as `make_or_remake`. Collective."""
    episodes: list[Any] = []

    def make() -> list[Trajectory]:
        nonlocal episodes
        episodes, played = take()
        return played

    trajectories = make_or_remake(mesh, sampler, make, publish, where)
    return episodes, trajectories  # those of the last attempt


def make_or_remake(mesh: Mesh, sampler: Sampler, make: Callable[[], T], publish: Callable[[], None], where: str) -> T:
    """What a leader makes of its samples, on all of its peers. Where a leader's servers lost their weights all ranks
    publish them, and it makes it once more; what its journal kept is not sampled again. Collective.
    """
    recall = getattr(sampler, "recall", lambda: None)  # of a journal, where there is one

    def attempt(number: int) -> tuple[T] | None:
        try:
            return (make(),)
        except Unpublished as error:
            if number == ATTEMPTS or hasattr(sampler, "submit"):
                raise  # of a stream all that is under way has failed
            log.warning("%s: %s; they are sent again, and it is sampled anew", where, error)
            recall()
            return None

    made: tuple[T] | None = None
    for number in range(1, ATTEMPTS + 1):
        if made is None:
            made = mesh.from_leader(partial(attempt, number))
        if not any(mesh.gather(made is None, patient=True)):
            break
        publish()
    assert made is not None  # the last attempt gives it or raises
    return made[0]
