"""`env: verifiers:NAME`: an installed taskset of verifiers with its environment, whose model is ours.

The environment asks its model at an address, so a small server in this process takes each request, and the episode's
generator hands it on as a prompt. One request is one turn.
"""

from __future__ import annotations

import asyncio
import json
import queue
import random
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property
from typing import Any

from ...core.errors import ConfigError
from ..environment import Environment, Message, Prompt, Score, Split
from .common import require, text_of

WAIT_S = 600.0  # for one turn of the environment; deadline_s of the recipe is what ends it earlier
HARNESS = "terrella_worlds"  # a chat without programs to install


class VerifiersEnvironment(Environment):
    """One agent with a chat model. Agents with tools, or that rewrite their conversation, are refused: those samples
    are Invalid.
    """

    def __init__(
        self,
        id: str,
        train_tasks: int = 1024,
        test_tasks: int = 64,
        settings: dict[str, Any] | None = None,  # of the taskset, as --env.taskset.KEY has them
        agent: dict[str, Any]
        | None = None,  # of the agent, as --env.agent.KEY has them; default: a chat in this process
        actions: list[str] | None = None,  # what random play draws from; default: the words of the prompt
    ) -> None:
        if min(train_tasks, test_tasks) < 1:
            raise ConfigError("train_tasks and test_tasks: at least 1")
        self.verifiers, self.actions = require("verifiers.v1"), actions
        # also where that package is not installed
        sys.modules.setdefault(HARNESS, require("terrella.rl.exchange.to_verifiers"))
        from verifiers.v1.configs.env import _declared_agent_configs
        from verifiers.v1.utils.loaders import default_harness_id, env_config_type, load_environment, resolve_env_config

        try:
            roles = list(_declared_agent_configs(env_config_type(id)()))
            if len(roles) != 1:
                raise ConfigError(
                    f"verifiers:{id}: has {len(roles)} agents ({', '.join(roles)}); an environment with one is "
                    "trained on"
                )
            chat = {"harness": {"id": HARNESS}} if default_harness_id(id) == "bash" else {}
            played = {"runtime": {"type": "subprocess"}, **chat, **(agent or {})}
            self.env = load_environment(
                resolve_env_config({"taskset": {"id": id, **(settings or {})}, roles[0]: played})
            )
            self.rows = list(self.env.taskset.head(train_tasks + test_tasks))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"verifiers:{id}: cannot be made: {type(error).__name__}: {error}") from error
        self.places = self._split(id, train_tasks, test_tasks)

    def _split(self, id: str, train: int, test: int) -> dict[Split, list[int]]:
        """One sequence cut in two, in the asked proportion where it is shorter; a held-out task that is also trained
        on is left out.
        """
        count = len(self.rows)
        first = train if count == train + test else count - max(1, round(count * test / (train + test)))
        kept = [
            json.dumps(row.data.model_dump(mode="json", exclude={"idx", "name"}), sort_keys=True) for row in self.rows
        ]
        known = set(kept[:first])
        held_out = [i for i in range(first, count) if kept[i] not in known]
        if first < 1 or not held_out:
            raise ConfigError(f"verifiers:{id}: of its {count} tasks none is left to hold out")
        return {"train": list(range(first)), "test": held_out}

    def tasks(self, split: Split) -> Sequence[Any]:
        """Numbers of the taskset's tasks."""
        return self.places[split]

    @cached_property
    def service(self) -> Service:
        """Where the environment's model is, started with the first episode."""
        return Service(self.env)

    def play(self, task: Any) -> Generator[Prompt, str, Score]:
        """What the environment's agent is asked, turn by turn; the reward is the one it recorded."""
        talk = self.service.begin(self.rows[task])
        try:
            before: list[Message] = []
            while not isinstance(asked := talk.next(), Ended):
                if before and asked[: len(before)] != before:
                    raise RuntimeError("the environment rewrote its conversation; its turns cannot be trained as one")
                new = asked[len(before) :]
                if before and any(message["role"] == "assistant" for message in new):
                    raise RuntimeError(
                        "the environment wrote an answer of its own into the conversation; it cannot be trained on"
                    )
                answer = yield asked if not before else "\n".join(message["content"] for message in new)
                before = [*asked, {"role": "assistant", "content": answer}]
                talk.answer(answer)
            if asked.fault:
                raise RuntimeError(asked.fault)
            return asked.score
        finally:
            talk.close()

    def baselines(self) -> Mapping[str, Callable[[Prompt, Any], str]]:
        """Random play: one of `actions`, else a word of what was said."""

        def drawn(prompt: Prompt, task: Any) -> str:
            text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
            return random.Random(f"{task}/{text}").choice(self.actions or text.split() or [""])

        return {"random": drawn}


class Ended:
    """How an episode ended: its score, or what failed."""

    def __init__(self, score: dict[str, float], fault: str = "") -> None:
        self.score, self.fault = score, fault


class Talk:
    """One episode, between the thread of the environment and the one that plays it."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.name, self.loop, self.asked = name, loop, queue.Queue[list[Message] | Ended]()
        self.answers = asyncio.Queue[str | None]()  # of the environment's loop
        self.episode: Any = None  # a future

    def next(self) -> list[Message] | Ended:
        """The next request of the environment, or its end."""
        try:
            return self.asked.get(timeout=WAIT_S)
        except queue.Empty:
            raise TimeoutError(f"the environment asked nothing for {WAIT_S:g} s") from None

    def answer(self, text: str) -> None:
        """What the model says."""
        self.loop.call_soon_threadsafe(self.answers.put_nowait, text)

    def close(self) -> None:
        """Give the episode up where it still runs."""
        self.loop.call_soon_threadsafe(self.answers.put_nowait, None)
        self.episode.cancel()


class Service:
    """The environment's loop in a thread of its own, with the server that its model requests come to."""

    def __init__(self, env: Any) -> None:
        self.env, self.talks, self.count, self.url = env, dict[str, Talk](), 0, ""
        self.loop, self.ready, self.fault = asyncio.new_event_loop(), threading.Event(), ""
        threading.Thread(target=self._run, daemon=True).start()
        if not self.ready.wait(WAIT_S) or self.fault:
            raise RuntimeError(f"the environment cannot be served: {self.fault or f'not ready after {WAIT_S:g} s'}")

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self._serve())
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}"
            self.ready.set()

    async def _serve(self) -> None:
        from aiohttp import web

        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", self._reply)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        async with self.env.serving():
            self.ready.set()
            await asyncio.Event().wait()  # the thread ends with the process

    def begin(self, task: Any) -> Talk:
        """Start one episode. Its model's name tells its requests from others'."""
        self.count += 1
        talk = self.talks[f"episode-{self.count}"] = Talk(f"episode-{self.count}", self.loop)
        talk.episode = asyncio.run_coroutine_threadsafe(self._episode(task, talk), self.loop)
        return talk

    async def _episode(self, task: Any, talk: Talk) -> None:
        import verifiers.v1 as vf

        client = vf.EvalClientConfig(base_url=self.url, api_key_var="TERRELLA_NO_KEY")
        ended = Ended({}, "the episode was given up")
        try:
            episode = await self.env.run_episode(
                task, vf.ModelContext(client=client, model=talk.name, sampling=vf.SamplingConfig())
            )
            faults = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            if not episode.ok:
                ended = Ended({}, f"{faults[-1].type}: {faults[-1].message}"[:500] if faults else "the episode failed")
            else:
                trace = episode.traces[0]
                ended = Ended(
                    {**{name: float(value) for name, value in trace.metrics.items()}, "reward": float(trace.reward)}
                )
        except Exception as error:
            ended = Ended({}, f"{type(error).__name__}: {error}"[:500])
        finally:
            self.talks.pop(talk.name, None)
            talk.asked.put(ended)

    async def _reply(self, request: Any) -> Any:
        from aiohttp import web

        body = await request.json()
        talk = self.talks.get(str(body.get("model")))
        if talk is None or body.get("tools"):
            reason = "its agent has tools, which a chat in text has not" if talk else "no such episode"
            return web.json_response({"error": {"message": reason}}, status=400)
        try:
            talk.asked.put([{"role": str(m["role"]), "content": _plain(m.get("content"))} for m in body["messages"]])
        except ValueError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        answer = await talk.answers.get()  # the episode ends it with None
        if answer is None:
            return web.json_response({"error": {"message": "the episode was given up"}}, status=400)
        message = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": answer}}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        made = {
            "id": talk.name,
            "object": "chat.completion",
            "created": 0,
            "model": talk.name,
            "choices": [message],
            "usage": usage,
        }
        return web.json_response(made)


def _plain(content: Any) -> str:
    """A message's text; ValueError where it has more than text."""
    if isinstance(content, str) or content is None:
        return text_of(content or "")
    if any(part.get("type") != "text" for part in content):
        raise ValueError("a message with more than text")
    return text_of("\n".join(part["text"] for part in content))
