"""Three OpenEnv servers in one process: a world of ours, one with an action of two fields, and one of numbers. Helper
module, not a test.

`python -m terrella.tests.rl.exchange.openenv_worlds` prints their addresses and serves until it is ended.
"""

import asyncio
import json
import socket

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

from terrella.rl.exchange.named_worlds import find_world
from terrella.rl.exchange.to_openenv import app_of


class Sum(Action):
    a: int
    b: int


class Count(Action):
    number: int


class Shown(Observation):
    goal: int = 0


class Adder(Environment):
    """Two numbers that add up to the goal, one try."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.goal = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.goal = (seed or 0) % 10
        return Shown(goal=self.goal)

    def step(self, action, timeout_s=None, **kwargs):
        return Shown(goal=self.goal, done=True, reward=float(action.a + action.b == self.goal))

    @property
    def state(self):
        return State()


class Counter(Adder):
    """The goal itself; three tries."""

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.left = 3
        return super().reset(seed)

    def step(self, action, timeout_s=None, **kwargs):
        self.left -= 1
        hit = action.number == self.goal
        return Shown(goal=self.goal, done=hit or not self.left, reward=float(hit))


APPS = {
    "sokoban": lambda: app_of(find_world("SimpleSokoban"), 64),
    "adder": lambda: create_fastapi_app(Adder, Sum, Shown, max_concurrent_envs=64),
    "counter": lambda: create_fastapi_app(Counter, Count, Shown, max_concurrent_envs=64),
}


async def serve() -> None:
    listening = {name: socket.create_server(("127.0.0.1", 0)) for name in APPS}
    servers = [uvicorn.Server(uvicorn.Config(make(), log_level="warning")) for make in APPS.values()]
    print(json.dumps({name: f"http://127.0.0.1:{s.getsockname()[1]}" for name, s in listening.items()}), flush=True)
    await asyncio.gather(*(server.serve(sockets=[s]) for server, s in zip(servers, listening.values(), strict=True)))


if __name__ == "__main__":
    asyncio.run(serve())
