"""The public RT-1 policies (SavedModel files of the RT-1 release) as a policy here. The only file that imports tensorflow. Not run: the
checkpoints and TensorFlow could not be had; the interface follows the release (256 x 320 picture, 512 numbers of a sentence embedding,
a network state that is handed on).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import ConfigError
from ...data.convert.rt1 import ACTION_PARTS

SMALL_GRIP = 0.01  # gripper values below this are noise


class RT1Policy:
    """`embed(instruction)` gives the sentence embedding (Universal Sentence Encoder large, 512 numbers)."""

    def __init__(self, folder: Path, embed: Callable[[str], np.ndarray], load: Callable[[str], Any] | None = None) -> None:
        self.policy = (load or _load)(str(folder))
        self.embed = embed
        self.reset(0)

    def reset(self, seed: int) -> None:
        self.state = self.policy.get_initial_state(batch_size=1)
        self.known: tuple[str, np.ndarray] | None = None

    def act(self, frame: np.ndarray, instruction: str) -> np.ndarray:
        """13 numbers in the order of the data set; parts that the policy does not give are 0."""
        if self.known is None or self.known[0] != instruction:
            self.known = (instruction, np.asarray(self.embed(instruction), np.float32))
        observation = {"image": frame[None], "natural_language_embedding": self.known[1][None]}
        told, self.state = self.policy.action(observation, self.state)
        return action_vector({name: np.asarray(value).reshape(-1) for name, value in told.items()})


def action_vector(parts: dict[str, np.ndarray]) -> np.ndarray:
    """An action's parts as 13 numbers; a small grip is no grip."""
    out = []
    for name, width in ACTION_PARTS.items():
        value = np.asarray(parts.get(name, np.zeros(width)), np.float64).reshape(-1)
        if value.size != width:
            raise ValueError(f"action part {name}: expected {width} numbers, got {value.size}")
        out.append(np.where(np.abs(value) < SMALL_GRIP, 0.0, value) if name == "gripper_closedness_action" else value)
    return np.concatenate(out)


def finished(action: np.ndarray) -> bool:
    """Whether terminate_episode is [1, 0, 0]."""
    return bool((action[7:10] == (1, 0, 0)).all())


def _load(folder: str) -> Any:
    try:
        import tensorflow as tf  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError("RT-1 policies need TensorFlow; install it beside terrella, it is not one of its requirements") from error
    return tf.saved_model.load(folder)
