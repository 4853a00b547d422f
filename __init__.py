"""Terrella trains world models, and the agents that live in them, with RL from verifiable rewards.

From Python: `train` and `evaluate` do what the command line does; `Environment` and `Invalid` are for a task of one's
own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data.trajectory import Invalid
    from .launch.api import RunResult, evaluate, train
    from .rl.environment import Environment

__version__ = "0.1.0"
__all__ = ["Environment", "Invalid", "RunResult", "__version__", "evaluate", "train"]

_WHERE = {  # loaded when they are asked for: importing the package loads nothing else
    "Environment": ".rl.environment",
    "Invalid": ".data.trajectory",
    "RunResult": ".launch.api",
    "evaluate": ".launch.api",
    "train": ".launch.api",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_WHERE[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
