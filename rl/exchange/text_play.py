"""Our worlds played in text by any chat model: what the interface of verifiers, and chat models behind an address,
are given.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from ..environment import Prompt
from .common import Seeded, last_line
from .named_worlds import NamedWorld, Play, find_world


class WorldInText(Seeded):
    """A named world, one action per turn."""

    def __init__(self, world: str | NamedWorld, train_tasks: int = 1024, test_tasks: int = 64) -> None:
        self.named = find_world(world) if isinstance(world, str) else world
        super().__init__(self.named.max_actions, train_tasks, test_tasks, self.named.instruction)
        words = self.named.make().action_words
        self.words = None if words is None else list(words.values())

    def how(self) -> str:
        if self.words is None:
            return "Answer with your action alone on the last line."
        return f"Answer with one of: {', '.join(self.words)}."

    def begin(self, seed: int) -> tuple[Any, str]:
        play = Play(self.named)
        return play, play.reset(seed).text

    def read(self, answer: str) -> str:
        return last_line(answer)

    def act(self, episode: Any, answer: str) -> tuple[str, float, bool]:
        turn = episode.step(answer)
        return turn.text, turn.reward, turn.done

    def random_answer(self, rng: random.Random) -> str:
        return rng.choice(self.words or [""])

    def baselines(self) -> Mapping[str, Callable[[Prompt, Any], str]]:
        """Random play, where the actions are words."""
        return super().baselines() if self.words else {}

    def end(self, episode: Any) -> None:
        episode.world.close()
