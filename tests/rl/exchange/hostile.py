"""An environment that hangs, raises, or shows 100 MB, by its seed. Helper module, not a test: importing it registers
it.
"""

import time

import gymnasium
from gymnasium import spaces


class Hostile(gymnasium.Env):
    """Seeds 1, 2 and 3 of every eight are hostile; the others give a point for the action 1."""

    observation_space, action_space = spaces.Text(10), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        kind = (seed or 0) % 8
        if kind == 1:
            time.sleep(1000)
        if kind == 2:
            raise OSError("the simulator is away")
        return "x" * (100_000_000 if kind == 3 else 3), {}

    def step(self, action):
        return "end", float(action == 1), True, False, {}


gymnasium.register("Hostile-v0", Hostile)
