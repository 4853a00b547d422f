"""Worlds behind OpenEnv's HTTP and WebSocket interface; each connection has a world of its own. `terrella worlds serve`
calls this.

`reset(seed=...)` begins an instance, the state holds a snapshot, and `reset(snapshot=...)` goes back to one.
"""

from __future__ import annotations

import base64
import random
import uuid
from typing import Any

from fastapi import FastAPI
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.types import EnvironmentMetadata
from pydantic import Field

from ...data.png import encode_png
from ..worlds.base import WorldFault
from .named_worlds import NamedWorld, Play, Turn


class WorldAction(Action):
    """What the player does: a word of the world's actions, or a text."""

    text: str = Field(max_length=100_000)


class WorldObservation(Observation):
    """What the player sees."""

    text: str
    instruction: str = ""  # with the first observation of an episode
    actions: list[str] = Field(default_factory=list)  # the words, where an action is one of them
    picture: str = ""  # the frame as a PNG in base64, where the world has frames
    truncated: bool = False  # the actions are used up
    info: dict[str, float] = Field(default_factory=dict)


class WorldState(State):
    """Where the episode is. A snapshot is given to `reset(snapshot=...)`, of this connection or of another."""

    world: str = ""
    seed: int = 0
    snapshot: dict[str, Any] | None = None


class WorldServer(Environment[WorldAction, WorldObservation, WorldState]):
    """One connection's world."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, named: NamedWorld) -> None:
        super().__init__()
        self.play, self.episode = Play(named), ""
        self.begun = False

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> WorldObservation:
        """Begin the instance of a seed (without one, of a random seed), or go back to a snapshot."""
        self.episode = episode_id or uuid.uuid4().hex
        snapshot = kwargs.get("snapshot")
        if snapshot is not None:
            turn = self.play.restore(snapshot)
        else:
            turn = self.play.reset(random.getrandbits(31) if seed is None else seed, int(kwargs.get("sample", 0)))
        self.begun = True
        return self._seen(turn, self.play.named.instruction)

    def step(self, action: WorldAction, timeout_s: float | None = None, **kwargs: Any) -> WorldObservation:
        """One action."""
        if not self.begun:
            raise WorldFault(f"{self.play.named.name}: reset it first")
        return self._seen(self.play.step(action.text))

    def _seen(self, turn: Turn, instruction: str = "") -> WorldObservation:
        frame = self.play.world.picture()
        return WorldObservation(
            text=turn.text,
            instruction=instruction,
            picture="" if frame is None else base64.b64encode(encode_png(frame)).decode(),
            actions=self.play.words or [],
            truncated=turn.truncated,
            info=turn.info,
            reward=turn.reward,
            done=turn.done,
        )

    @property
    def state(self) -> WorldState:
        """Episode, seed and a snapshot."""
        play = self.play
        snapshot = play.snapshot() if self.begun else None
        return WorldState(
            episode_id=self.episode or None,
            step_count=play.actions,
            world=play.named.name,
            seed=play.seed,
            snapshot=snapshot,
        )

    def get_metadata(self) -> EnvironmentMetadata:
        """The world's name and what the player is told."""
        return EnvironmentMetadata(
            name=self.play.named.name, description=self.play.named.instruction or self.play.named.name
        )

    def close(self) -> None:
        """Give back what the world holds, such as a browser."""
        self.play.world.close()


def app_of(named: NamedWorld, most: int = 256) -> FastAPI:
    """The web application of one world, for at most so many connections at once."""
    return create_fastapi_app(
        lambda: WorldServer(named),
        WorldAction,
        WorldObservation,
        max_concurrent_envs=most,
        env_name=named.name,
        state_cls=WorldState,
    )
