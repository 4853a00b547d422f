"""StarPO-S: PPO on the groups the policy is most uncertain about, those whose rewards differ most."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...data.trajectory import Trajectory
from ...kernels.advantage import variance_filter
from . import common
from .common import Gather
from .config import StarPOS
from .ppo import prepare

__all__ = ["keep", "prepare"]


def keep(config: StarPOS, trajectories: Sequence[Trajectory], gather: Gather) -> list[Trajectory]:
    """This rank's trajectories of the `keep` share of all ranks' groups with the largest std of rewards; at least
    one group.
    """
    rewards = common.rewards_of(trajectories)
    parts = gather([(t.prompt_id, r, common.is_valid(t)) for t, r in zip(trajectories, rewards, strict=True)])
    everything = [row for part in parts for row in part]
    chosen = variance_filter(
        torch.tensor([r for _, r, _ in everything]),
        [prompt for prompt, _, _ in everything],
        keep=config.keep,
        valid_S=torch.tensor([v for _, _, v in everything]),
    )
    kept = {prompt for (prompt, _, _), hit in zip(everything, chosen.tolist(), strict=True) if hit}
    return [t for t in trajectories if t.prompt_id in kept]
