"""`env: gymnasium:ID`: an environment of Gymnasium, played in text."""

from __future__ import annotations

import json
import random
from typing import Any, Literal

from ...core.errors import ConfigError
from .common import Seeded, last_line, one_of, renderer_of, require


class GymnasiumEnvironment(Seeded):
    """Actions are numbers or words (Discrete), lists of numbers (Box, MultiDiscrete, MultiBinary) or texts."""

    def __init__(
        self,
        id: str,
        actions: list[str] | None = None,  # words for the actions of a Discrete space, in their order
        render: Literal[
            "observation", "ansi"
        ] = "observation",  # what is shown: the observation, or the environment's own drawing
        renderer: str | None = None,  # file.py:function of an observation, for those that are no text
        settings: dict[str, Any] | None = None,  # keyword arguments of gymnasium.make
        **limits: Any,
    ) -> None:
        super().__init__(**limits)
        self.gymnasium = require("gymnasium")
        self.id, self.render, self.settings = id, render, dict(settings or {})
        if render not in ("observation", "ansi"):
            raise ConfigError(f"render = {render!r}: must be observation or ansi")
        if render == "ansi":
            self.settings["render_mode"] = "ansi"
        self.to_text = renderer_of(renderer)
        try:
            made = self._make()
            self.space, self.spec = made.action_space, made.spec
            made.close()
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"gymnasium:{id}: cannot be made: {type(error).__name__}: {error}") from error
        self.words = self._words(actions)

    def _make(self) -> Any:
        return self.gymnasium.make(self.id, disable_env_checker=True, **self.settings)

    def _words(self, actions: list[str] | None) -> list[str] | None:
        kind = type(self.space).__name__
        if kind not in ("Discrete", "Box", "MultiDiscrete", "MultiBinary") and not isinstance(
            self.space, self.gymnasium.spaces.Text
        ):
            raise ConfigError(f"gymnasium:{self.id}: its actions are a {kind}, which no text is read as")
        if kind != "Discrete":
            if actions is not None:
                raise ConfigError(f"actions: gymnasium:{self.id} has actions of {self.space}, which have no words")
            return None
        first, n = int(self.space.start), int(self.space.n)
        if actions is not None and (len(actions) != n or len({a.lower() for a in actions}) < n):
            raise ConfigError(
                f"actions: gymnasium:{self.id} has {n} actions, so {n} different words are needed, not {len(actions)}"
            )
        return actions or [str(first + i) for i in range(n)]

    def how(self) -> str:
        if self.words is not None:
            return one_of(self.words)
        if isinstance(self.space, self.gymnasium.spaces.Text):
            return "Answer with the text of your action."
        return f"Answer with a JSON list of {int(self.space.sample().size)} numbers."

    def begin(self, seed: int) -> tuple[Any, str]:
        made = self._make()
        observation, _ = made.reset(seed=seed)
        return made, self._seen(made, observation)

    def _seen(self, made: Any, observation: Any) -> str:
        return self.to_text(made.render() if self.render == "ansi" else observation)

    def act(self, episode: Any, answer: Any) -> tuple[str, float, bool]:
        observation, reward, terminated, truncated, _ = episode.step(answer)
        return self._seen(episode, observation), float(reward), bool(terminated or truncated)

    def read(self, answer: str) -> Any:
        text = last_line(answer)
        if self.words is not None:
            places = {word.lower(): place for place, word in enumerate(self.words)}
            if text.lower().rstrip(".") not in places:
                raise ValueError(f"{text[:80]!r} is no action")
            return int(self.space.start) + places[text.lower().rstrip(".")]
        if isinstance(self.space, self.gymnasium.spaces.Text):
            return answer.strip()
        import numpy as np

        try:
            action = np.asarray(json.loads(text), dtype=self.space.dtype).reshape(self.space.shape)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{text[:80]!r} is no list of {int(self.space.sample().size)} numbers") from error
        if not self.space.contains(action):
            raise ValueError(f"{text[:80]!r} is outside of {self.space}")
        return action

    def random_answer(self, rng: random.Random) -> str:
        if self.words is not None:
            return rng.choice(self.words)
        self.space.seed(rng.getrandbits(31))
        drawn = self.space.sample()
        return drawn if isinstance(drawn, str) else json.dumps(drawn.reshape(-1).tolist())

    def end(self, episode: Any) -> None:
        episode.close()
