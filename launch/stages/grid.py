"""What the stages of a grid's world model share: the true dynamics, and the tokenizer of its symbols."""

from __future__ import annotations

from functools import lru_cache

from ...data.tokenizers import CharTokenizer
from ...rl.imagination import GridDynamics
from ..job import Job


@lru_cache(maxsize=2)
def _dynamics(world: str) -> GridDynamics:
    return GridDynamics.of(world)


def dynamics_of(job: Job) -> GridDynamics:
    """How the recipe's world truly moves."""
    return _dynamics(job.recipe.world)


def tokenizer_of(job: Job) -> CharTokenizer:
    """One token for every symbol of the world's states, and one for each action."""
    return dynamics_of(job).tokenizer()
