"""One file per algorithm. Each has `prepare` (sequences with weights), `keep` where it filters, and `settings` where
its policy loss is another than GRPO's with the same options.

A step is: roll out, `keep`, score what `needs` names, `prepare`, pack, one engine step.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .config import MODULES

if TYPE_CHECKING:
    from ...data.packing import TrainSequence
    from ...data.trajectory import Trajectory
    from ...kernels.policy import PolicySettings
    from .common import Gather, Scores


def module_of(config: Any) -> ModuleType:
    """The module of an algorithm's settings."""
    return importlib.import_module(f".{MODULES[config.kind]}", __package__)


def needs(config: Any) -> frozenset[str]:
    """Which of `Scores` must be there before `prepare`: reference, policy, values."""
    wanted = set()
    if getattr(config, "kl_coef", 0.0):
        wanted.add("reference")
    if getattr(config, "tis_cap", None) is not None:
        wanted.add("policy")
    if config.kind in ("ppo", "starpo-s"):
        wanted.add("values")
    return frozenset(wanted)


def settings(config: Any, temperature: float) -> PolicySettings:
    """The policy loss of an algorithm."""
    from .common import policy_settings

    return getattr(module_of(config), "settings", policy_settings)(config, temperature)


def keep(config: Any, trajectories: Sequence[Trajectory], gather: Gather) -> list[Trajectory]:
    """The trajectories an algorithm trains on, Invalid ones left to `prepare` to pass over."""
    module = module_of(config)
    return module.keep(config, trajectories, gather) if hasattr(module, "keep") else list(trajectories)


def prepare(config: Any, trajectories: Sequence[Trajectory], scores: Scores, gather: Gather) -> list[TrainSequence]:
    """This rank's sequences with weights that make the sum over all ranks the algorithm's loss."""
    return module_of(config).prepare(config, trajectories, scores, gather)
