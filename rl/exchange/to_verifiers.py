"""Our worlds as a taskset of verifiers: `vf-eval terrella-worlds --env.taskset.world SimpleSokoban`.

One task is one seed. The environment plays the user: it shows the state and takes the model's answer as an action. The
harness asks the model in this process, so that no program has to be installed for it.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import verifiers.v1 as vf
from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError
from verifiers.v1.dialects.chat import message_to_wire

from ...data.trajectory import Invalid
from ..worlds.base import WorldFault
from .named_worlds import Play, find_world
from .text_play import WorldInText

__all__ = ["ChatHarness", "WorldTaskset", "WorldsEnv"]  # verifiers finds its plugins by this list
ANSWER_S = 600.0  # that one answer of a model may take
RETRIES = (
    6  # of one request: verifiers waits 5 s for a connection to the model, once, and leaves trying again to harnesses
)


class WorldData(vf.TaskData):
    """Which instance of which world."""

    world: str
    seed: int


class WorldTask(vf.Task[WorldData]):
    """One seed of a world."""

    async def validate(self, runtime: Any) -> bool:
        """Whether the seed leads to the same start twice, and a snapshot through JSON goes back to it."""

        def check() -> bool:
            named = find_world(self.data.world)
            one, other = Play(named), Play(named)
            try:
                start = one.reset(self.data.seed)
                if not start.text or other.reset(self.data.seed) != start:
                    return False
                kept = json.loads(json.dumps(one.snapshot()))
                one.step(one.random_action(random.Random(self.data.seed)))
                return one.restore(kept) == start
            except WorldFault as error:
                raise RuntimeError(f"{self.data.world}, seed {self.data.seed}: {error}") from error

        return await asyncio.to_thread(check)


class WorldsConfig(vf.TasksetConfig):
    """Which world, and which seeds of it."""

    world: str = "SimpleSokoban"
    first_seed: int = 123
    seeds: int = 128


class WorldTaskset(vf.Taskset[WorldTask, WorldsConfig]):
    """The seeds of a world."""

    def load(self) -> Iterator[WorldTask]:
        config = self.config
        find_world(config.world)  # an unknown name is refused before anything is played
        for number in range(config.seeds):
            seed = config.first_seed + number
            data = WorldData(idx=number, name=f"{config.world}#{seed}", prompt=None, world=config.world, seed=seed)
            yield WorldTask(data, config.task)


class WorldsEnvConfig(vf.EnvConfig):
    """Who plays."""

    player: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class WorldsEnv(vf.Env[WorldsEnvConfig]):
    """One episode: a turn is an observation and the action that answers it."""

    async def run(self, task: Any, agents: Any) -> None:
        """Play, and put the sum of the rewards and the further numbers of the score onto the trace."""
        data, loop = task.data, asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as own:  # a world with a browser wants to be called from one thread
            playing = WorldInText(data.world).play({"seed": data.seed})
            said, score = await loop.run_in_executor(own, _advance, playing, None)
            async with agents.player.interaction(task) as interaction:
                while score is None:
                    segment = await interaction.turn(said)
                    if segment.terminated:  # a limit of the run: the episode has no score
                        break
                    said, score = await loop.run_in_executor(own, _advance, playing, segment.last_reply)
            await loop.run_in_executor(own, playing.close)
        if score is not None:
            interaction.trace.record_reward("world_reward", score.pop("reward"))
            interaction.trace.record_metrics(score)


def _advance(playing: Any, answer: str | None) -> tuple[str, dict[str, float] | None]:
    """What is said next, or the score."""
    try:
        return playing.send(answer), None
    except StopIteration as ended:
        if isinstance(ended.value, Invalid):
            raise RuntimeError(ended.value.reason) from None
        return "", dict(ended.value)


@cache
def _certificates() -> ssl.SSLContext:
    """Read once: it takes 50 ms of the loop that all episodes share, which every turn would spend again."""
    return ssl.create_default_context()


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """A chat without tools: one request for each turn."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> vf.ProgramResult:
        """Ask the model once, through the interception of verifiers, which writes it down."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else [message_to_wire(m) for m in prompt or []]
        )
        if system:
            messages.insert(0, {"role": "system", "content": system})
        wire = DefaultAsyncHttpxClient(verify=_certificates())
        async with AsyncOpenAI(
            base_url=endpoint, api_key=secret, timeout=ANSWER_S, max_retries=RETRIES, http_client=wire
        ) as client:
            try:
                await client.chat.completions.create(model=ctx.model, messages=messages)
            except OpenAIError as error:
                said = error.response.text if isinstance(error, APIStatusError) else str(error)
                return vf.ProgramResult(1, "", said[:2000])
        return vf.ProgramResult(0, "", "")
