"""StarPO-S: PPO on the groups the policy is most uncertain about, those whose rewards differ most."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...data.trajectory import Trajectory
from ...kernels.advantage import variance_filter
from . import common, ppo
from .common import Gather
from .config import StarPOS
from .ppo import advantages, prepare, settings, value_loss, value_score

__all__ = ["advantages", "keep", "ppo", "prepare", "settings", "value_loss", "value_score"]


def keep(config: StarPOS, trajectories: Sequence[Trajectory], gather: Gather) -> list[Trajectory]:
    """This rank's trajectories of the `keep` share of all ranks' groups with the largest std of rewards; at least
    one group.
    """
    rewards, valid = common.rewards_of(trajectories)
    parts = gather([(t.prompt_id, r, bool(v)) for t, r, v in zip(trajectories, rewards, valid, strict=True)])
    everything = [row for part in parts for row in part]
    chosen = variance_filter(
        torch.tensor([r for _, r, _ in everything]),
        [prompt for prompt, _, _ in everything],
        keep=config.keep,
        valid_S=torch.tensor([v for _, _, v in everything]),
    )
    kept = {prompt for (prompt, _, _), hit in zip(everything, chosen.tolist(), strict=True) if hit}
    return [t for t in trajectories if t.prompt_id in kept]
