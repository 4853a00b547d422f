"""The rollouts of a step, sampled anew where servers lost the weights that only all ranks of the trainer can send."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from ...core.mesh import Mesh
from ...data.trajectory import Trajectory
from .sampler import Sampler, Unpublished

log = logging.getLogger("terrella")
ATTEMPTS = 3

Played = tuple[list[Any], list[Trajectory]]  # episodes and what came of them


def take_or_retake(
    mesh: Mesh, sampler: Sampler, take: Callable[[], Played], publish: Callable[[], None], where: str
) -> Played:
    """The episodes that a leader takes, and their trajectories on all ranks. Where a leader's servers lost their
    weights all ranks publish them, and it takes once more; what its journal kept is not sampled again. Collective.
    """
    recall = getattr(sampler, "recall", lambda: None)  # of a journal, where there is one
    episodes: list[Any] = []

    def attempt(number: int) -> list[Trajectory] | None:
        nonlocal episodes
        try:
            episodes, played = take()
            return played
        except Unpublished as error:
            if number == ATTEMPTS or hasattr(sampler, "submit"):
                raise  # of a stream all that is under way has failed
            log.warning("%s: %s; they are sent again, and the step is sampled anew", where, error)
            recall()
            return None

    trajectories: list[Trajectory] | None = None
    for number in range(1, ATTEMPTS + 1):
        if trajectories is None:
            trajectories = mesh.from_leader(partial(attempt, number))
        if not any(mesh.gather(trajectories is None, patient=True)):
            break
        publish()
    assert trajectories is not None  # the last attempt gives some or raises
    return episodes, trajectories
