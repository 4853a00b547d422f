"""Advantages by a user's own function, named in the recipe as `algorithm: {kind: file.py:name}`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...core.by_path import describe_error
from ...core.errors import ConfigError
from ...data.packing import TrainSequence
from ...data.trajectory import Trajectory
from . import common
from .common import Gather, Scores
from .config import OwnAlgorithm


def prepare(
    config: OwnAlgorithm, trajectories: Sequence[Trajectory], scores: Scores, gather: Gather
) -> list[TrainSequence]:
    """Every group's valid samples go to the function; an advantage holds for all tokens of its sample."""
    rewards = common.with_kl_reward(config, trajectories, common.rewards_of(trajectories), scores)
    groups: dict[int, list[int]] = {}
    for i, trajectory in enumerate(trajectories):
        if common.is_valid(trajectory):
            groups.setdefault(trajectory.prompt_id, []).append(i)
    values = np.zeros(len(trajectories))
    for group in groups.values():
        values[group] = advantages_of(
            config, [float(rewards[i]) for i in group], [dict(trajectories[i].info) for i in group]
        )
    rows = [np.full(len(sequence.ids), values[i]) for i, sequence in common.rows(trajectories)]
    return common.weigh(config, trajectories, rows, common.denominator(config, trajectories, gather), scores)


def advantages_of(config: OwnAlgorithm, rewards: list[float], infos: list[dict]) -> list[float]:
    """What the function gives for one group, refused by name where it is not one finite number a sample."""
    try:
        given = [float(value) for value in config.load()(rewards, infos, **config.args)]
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"algorithm: {config.path} failed on the rewards {rewards}: {describe_error(error, config.path)}"
        ) from error
    if len(given) != len(rewards) or not all(map(math.isfinite, given)):
        raise ConfigError(
            f"algorithm: {config.path} gave {given} for {len(rewards)} rewards; one finite number each is needed"
        )
    return given
