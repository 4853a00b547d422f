"""DAPO: GRPO with a wider upper clip, only groups whose rewards differ, and a soft penalty on overlong answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...data.packing import TrainSequence
from ...data.trajectory import Trajectory
from . import common
from .common import Gather, Scores
from .config import DAPO


def keep(config: DAPO, trajectories: Sequence[Trajectory], gather: Gather) -> list[Trajectory]:
    """The trajectories of groups whose rewards are not all equal: the others carry no gradient."""
    seen: dict[int, set[float]] = {}
    for t in trajectories:
        if common.is_valid(t):
            seen.setdefault(t.prompt_id, set()).add(float(t.reward))  # type: ignore[arg-type]
    return [t for t in trajectories if len(seen.get(t.prompt_id, ())) > 1]


def overlong_penalty(config: DAPO, length: int) -> float:
    """0 up to overlong_length - overlong_cache, then linear down to -1 at overlong_length and beyond."""
    if not config.overlong_length:
        return 0.0
    free = config.overlong_length - config.overlong_cache
    return max(min((free - length) / config.overlong_cache, 0.0), -1.0)


def shaped_rewards(config: DAPO, trajectories: Sequence[Trajectory]) -> np.ndarray:
    """Rewards with the penalty on length."""
    rewards = common.rewards_of(trajectories)
    return rewards + [overlong_penalty(config, common.action_tokens([t])) for t in trajectories]


def prepare(config: DAPO, trajectories: Sequence[Trajectory], scores: Scores, gather: Gather) -> list[TrainSequence]:
    """Token-mean GRPO on the shaped rewards."""
    rewards = common.with_kl_reward(config, trajectories, shaped_rewards(config, trajectories), scores)
    values = common.group_advantages("mean_std", trajectories, rewards, scores.device, gather)
    return common.weigh(config, trajectories, values, common.denominator(config, trajectories, gather), scores)
