"""StarPO-S: PPO on the groups the policy is most uncertain about, those whose rewards differ most."""

from .common import most_varied as keep
from .ppo import prepare

__all__ = ["keep", "prepare"]
