"""Episodes with worlds in the loop: each runs as its own coroutine, worlds step in threads, every wait has a deadline.

A fault (of the sampler, a world that hangs or breaks, a reward that raises) makes the attempt Invalid. The episode is
then restarted within a budget; only when that is used up does the trajectory stay Invalid. A malformed answer of the
model is not a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..data.trajectory import Invalid, Role, TokenSequence, Trajectory, continued
from .rollout.concurrent import Calls
from .rollout.episodes import Ask, Episode, Imagined, play_all, sampled_sequence, with_retries
from .rollout.sampler import Sample, Sampler, SampleRequest, SamplingParams


@dataclass(frozen=True)
class Limits:
    """Deadlines and budgets of a rollout."""

    world_s: float = 60.0  # one step of one world, or its reset
    reward_s: float = 60.0
    workers: int = 16  # worlds stepped at once
    retries: int = 2  # of one continuation by the sampler
    restarts: int = 1  # of an episode after a fault
    max_turns: int = 100

    def __post_init__(self) -> None:
        if (
            min(self.world_s, self.reward_s) <= 0
            or min(self.workers, self.max_turns) < 1
            or min(self.retries, self.restarts) < 0
        ):
            raise ValueError(f"limits: deadlines, workers and turns must be positive, budgets at least 0, not {self}")


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Imagination:
    """A world model that episodes may ask; `room` bounds a question and its answer together, in tokens."""

    sampler: Sampler
    room: int | None = None


def rollout_worlds(
    sampler: Sampler,
    makers: Sequence[Callable[[], Episode]],
    params: SamplingParams,
    seed: int,
    limits: Limits = DEFAULT_LIMITS,
    imagination: Imagination | None = None,
    seat: Callable[[int], AbstractAsyncContextManager[Any]] = lambda number: nullcontext(),
) -> list[Trajectory]:
    """Run all episodes to their end; `makers` build them, again after a fault. A restarted episode samples the same
    tokens as long as the weights are the same. `seat(number)` is held while an episode is played and limits how many
    are open at once; only a stream can be used with such a limit, since any other sampler is asked once all live
    episodes wait for it. `imagination` answers what episodes ask of a world model.
    """
    lanes: list[_Lanes] = []

    async def play(number: int, ask: Ask, imagine: Ask | None = None) -> Trajectory:
        if not lanes:
            lanes.append(_Lanes(Calls(limits.workers), Calls(1)))
        async with seat(number):
            world = _WorldModel(imagine, imagination.room, params.stop_ids) if imagine and imagination else None
            return await attempts(makers[number], _Policy(ask, params), world)

    async def attempts(make: Callable[[], Episode], policy: _Policy, world: _WorldModel | None) -> Trajectory:
        name = (-1, -1)
        for restarts in range(limits.restarts + 1):
            attempt = _Attempt(lanes[0], limits)
            scored = await attempt.run(make, policy, world, seed)
            name = attempt.name or name
            fault = scored if isinstance(scored, Invalid) else scored[1] if isinstance(scored[1], Invalid) else None
            if fault is None or restarts == limits.restarts:
                break
        turn_rewards, reward, info = ([], scored, {}) if isinstance(scored, Invalid) else scored
        info = {**info, "restarts": restarts} if restarts else info
        return Trajectory(*name, joined(attempt.turns), reward if fault is None else fault, turn_rewards, info)

    try:
        samplers = [sampler] if imagination is None else [sampler, imagination.sampler]
        return play_all(samplers, [partial(play, number) for number in range(len(makers))])
    finally:
        for lane in lanes:
            lane.worlds.close()
            lane.contexts.close()


@dataclass(frozen=True)
class _Lanes:
    """Threads of a rollout. A single thread builds contexts: tokenizers need not be thread-safe."""

    worlds: Calls
    contexts: Calls


@dataclass(frozen=True)
class _Policy:
    """The sampler that plays, and its sampling parameters."""

    ask: Ask
    params: SamplingParams


@dataclass(frozen=True)
class _WorldModel:
    """The world model, asked greedily."""

    ask: Ask
    room: int | None
    stop_ids: tuple[int, ...]

    def params(self, asked: int) -> SamplingParams:
        """An answer holds a state, like its question, so a multiple of the question's length is enough."""
        longest = 2 * asked + 16
        return SamplingParams(
            longest if self.room is None else max(1, min(longest, self.room - asked)), 0.0, stop_ids=self.stop_ids
        )


@dataclass
class _Attempt:
    """One try at an episode."""

    lanes: _Lanes
    limits: Limits
    name: tuple[int, int] | None = None
    turns: list[tuple[tuple[int, ...], Sample]] = field(default_factory=list)

    async def run(
        self, make: Callable[[], Episode], policy: _Policy, world: _WorldModel | None, seed: int
    ) -> tuple[list[float], float | Invalid, dict] | Invalid:
        """The episode's score, or what went wrong."""
        worlds, limits = self.lanes.worlds, self.limits
        episode = await worlds(make, limits.world_s, "world reset")
        if isinstance(episode, Invalid):
            return episode
        self.name = episode.prompt_id, episode.sample_index
        imagined = isinstance(episode, Imagined)
        if imagined and world is None:
            return Invalid("episode: its world is imagined, and there is no world model to ask")
        turn = 0
        while (context := await self.lanes.contexts(episode.context, limits.world_s, "context")) is not None:
            if isinstance(context, Invalid):
                return context
            if turn == limits.max_turns:
                return Invalid(f"episode: not over after max_turns = {limits.max_turns}")
            request = SampleRequest(context, (seed, *self.name, turn), policy.params)
            answer = await with_retries(policy.ask, request, limits.retries)
            if isinstance(answer, Invalid):
                return answer
            self.turns.append((context, answer))
            outcome = await worlds(partial(episode.receive, answer), limits.world_s, "world step")
            if isinstance(outcome, Invalid):
                return outcome
            asked = await self.lanes.contexts(episode.question, limits.world_s, "question") if imagined else None
            if isinstance(asked, Invalid):
                return asked
            if asked is not None and world is not None:
                request = SampleRequest(asked, (seed, *self.name, turn), world.params(len(asked)))
                prediction = await with_retries(world.ask, request, limits.retries)
                if isinstance(prediction, Invalid):
                    return prediction
                outcome = await worlds(partial(episode.imagine, prediction), limits.world_s, "imagined step")
                if isinstance(outcome, Invalid):
                    return outcome
            turn += 1
        return await worlds(episode.score, limits.reward_s, "reward")


def joined(turns: Sequence[tuple[tuple[int, ...], Sample]]) -> list[TokenSequence]:
    """Turns as sequences. A context that continues everything before it extends the sequence: what the world added is
    OBSERVATION, what was sampled ACTION. Any other context (a window that moved) starts a new sequence."""
    sequences: list[TokenSequence] = []
    for context, sample in turns:
        last = sequences[-1] if sequences else None
        if last is not None and len(context) >= len(last.ids) and context[: len(last.ids)] == last.ids:
            fresh = sampled_sequence(context[len(last.ids) :], sample)
            roles = tuple(Role.OBSERVATION if role == Role.PROMPT else role for role in fresh.roles)
            version = min(last.weight_version, fresh.weight_version)  # the oldest decides how stale it is
            versions = last.token_versions + fresh.token_versions
            sequences[-1] = TokenSequence(
                last.ids + fresh.ids,
                last.roles + roles,
                last.logprobs + fresh.logprobs,
                version,
                versions if len(set(versions)) > 1 else (),
                # the last token of a turn is fed only when the next one begins
                continued(last.experts, sample.experts, len(last.ids) - 1, len(context) + len(sample.ids)),
            )
        else:
            sequences.append(sampled_sequence(context, sample))
    return sequences
