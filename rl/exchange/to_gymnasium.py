"""Our worlds as Gymnasium environments. Importing this module registers them:
`gymnasium.make("terrella/SimpleSokoban-v0")`.

Where a world has action words, an action is their index, else a text. An observation is the text of the state, or its
frame where the world has frames (`info["text"]` then has the text).
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from ..worlds.base import Snapshot
from .named_worlds import NamedWorld, Play, Turn, find_world, names

LONGEST = 1_000_000  # characters of a text
PRINTABLE = "".join(map(chr, range(32, 127)))  # what random texts are made of


class AnyText(spaces.Text):
    """Texts of any characters: a page or a drawing may hold every letter there is, and a charset could not list
    them.
    """

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and self.min_length <= len(x) <= self.max_length

    def __repr__(self) -> str:
        return f"AnyText({self.min_length}, {self.max_length})"


class WorldEnv(gymnasium.Env[Any, Any]):
    """A named world. `reset(seed=...)` begins the instance of that seed, `options={"sample": n}` one with other
    chance moves.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}

    def __init__(self, world: str | NamedWorld, render_mode: str | None = None) -> None:
        named = find_world(world) if isinstance(world, str) else world
        self.play, self.render_mode = Play(named), render_mode
        self.words = self.play.words
        self.observation_space = (
            AnyText(LONGEST, min_length=0, charset=PRINTABLE)
            if named.frame is None
            else spaces.Box(0, 255, (*named.frame, 3), np.uint8)
        )
        self.action_space = (
            AnyText(200, min_length=0, charset=PRINTABLE) if self.words is None else spaces.Discrete(len(self.words))
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; without a seed, one that the environment's own generator draws."""
        super().reset(seed=seed)
        instance = int(self.np_random.integers(1 << 31)) if seed is None else seed
        turn = self.play.reset(instance, int((options or {}).get("sample", 0)))
        return self._seen(turn), {"instruction": self.play.named.instruction, "seed": instance, **self._text(turn)}

    def _seen(self, turn: Turn) -> Any:
        return turn.text if self.play.named.frame is None else self.play.world.picture().copy()

    def _text(self, turn: Turn) -> dict[str, str]:
        return {} if self.play.named.frame is None else {"text": turn.text}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One action: the index of a word, the word itself, or a text."""
        text = action if isinstance(action, str) else (self.words or [])[int(np.asarray(action).item())]
        turn = self.play.step(text)
        return self._seen(turn), turn.reward, turn.terminated, turn.truncated, {**turn.info, **self._text(turn)}

    def render(self) -> Any:
        """The state as text in the mode `ansi`, its frame in the mode `rgb_array`."""
        if self.render_mode == "rgb_array":
            return self.play.world.picture()
        return self.play.last.text if self.render_mode == "ansi" else None

    def snapshot(self) -> Snapshot:
        """The whole state as JSON values."""
        return self.play.snapshot()

    def restore(self, snapshot: Snapshot) -> Any:
        """Go back to a snapshot; the observation that belongs to it."""
        return self._seen(self.play.restore(snapshot))

    def close(self) -> None:
        """Give back what the world holds, such as a browser."""
        self.play.world.close()


def id_of(world: str) -> str:
    """The name of a world in Gymnasium's registry."""
    return f"terrella/{world.replace('/', '-')}-v0"


def register() -> None:
    """Make every world known to `gymnasium.make`; those that are known already are left alone."""
    for name in names():
        if id_of(name) not in gymnasium.registry:
            gymnasium.register(id_of(name), f"{__name__}:WorldEnv", kwargs={"world": name})


register()
