"""Rollouts: every episode runs as its own coroutine, which asks for a continuation, takes it, and asks again.

A `Stream` answers each request as soon as its tokens are there. Any other sampler is called once all live episodes wait
for it, so that a batch, and with it the last bits of its log-probs, never depends on timing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

from ...data.trajectory import Invalid, Role, Routing, TokenSequence, Trajectory
from .concurrent import run_to_end
from .sampler import Sample, Sampler, SampleRequest, SamplingParams

T = TypeVar("T")
Ask = Callable[[SampleRequest], Awaitable[Sample | Invalid]]


class Episode(Protocol):
    """One sample of one prompt. It provides contexts and receives what was sampled, until it is over.

    An episode may have `forced`, tokens that the sampler inserts between sampled spans, such as the actions of a video,
    and `scored_together`: its score is then requested once all episodes are over.
    """

    prompt_id: int
    sample_index: int

    def context(self) -> tuple[int, ...] | None:
        """The token ids to continue from in this turn, or None when the episode is over."""
        ...

    def receive(self, sample: Sample) -> None:
        """Take the sampler's continuation of the last context."""
        ...

    def score(self) -> tuple[list[float], float | Invalid, dict]:
        """Turn rewards, the trajectory's reward, and what the report should show."""
        ...


@runtime_checkable
class Imagined(Protocol):
    """An episode in an imagined world: after an answer it may ask the world model what follows."""

    def question(self) -> tuple[int, ...] | None:
        """Ids for the world model to continue, or None if there is nothing to ask."""
        ...

    def imagine(self, sample: Sample) -> None:
        """Take the world model's continuation."""
        ...


def sampled_sequence(context: Sequence[int], sample: Sample) -> TokenSequence:
    """Context and continuation as one sequence, in which exactly the sampled tokens have the role ACTION. `context` may
    be only the end of what was continued.
    """
    sampled = (Role.ACTION,) * len(sample.ids)
    if sample.forced is not None:
        sampled = tuple(Role.OBSERVATION if given else Role.ACTION for given in sample.forced)
    roles = (Role.PROMPT,) * len(context) + sampled
    versions = (sample.versions[0],) * len(context) + sample.versions if sample.versions else ()
    logprobs = (0.0,) * len(context) + sample.logprobs
    experts = sample.experts
    if experts is not None and len(experts) > len(roles):
        experts = Routing.of(experts.array()[-len(roles) :])
    return TokenSequence((*context, *sample.ids), roles, logprobs, sample.weight_version, versions, experts)


def rollout(
    sampler: Sampler, episodes: Sequence[Episode], params: SamplingParams, seed: int, retries: int = 2
) -> list[Trajectory]:
    """Play all episodes to their end. A sampler fault is retried, then makes the trajectory Invalid, never a reward of
    0.
    """

    async def play(episode: Episode, ask: Ask) -> Callable[[], Trajectory]:
        sequences: list[TokenSequence] = []
        turn = 0
        while (context := episode.context()) is not None:
            key = (seed, episode.prompt_id, episode.sample_index, turn)
            request = SampleRequest(context, key, params, getattr(episode, "forced", ()))
            answer = await with_retries(ask, request, retries)
            if isinstance(answer, Invalid):
                lost = Trajectory(episode.prompt_id, episode.sample_index, sequences, answer)
                return lambda: lost
            sequences.append(sampled_sequence(context, answer))
            episode.receive(answer)
            turn += 1
        if getattr(episode, "scored_together", False):
            return partial(_scored, episode, sequences)
        trajectory = _scored(episode, sequences)
        return lambda: trajectory

    played = play_all([sampler], [lambda ask, episode=episode: play(episode, ask) for episode in episodes])
    return [trajectory() for trajectory in played]


def _scored(episode: Episode, sequences: list[TokenSequence]) -> Trajectory:
    turn_rewards, reward, info = episode.score()
    return Trajectory(episode.prompt_id, episode.sample_index, sequences, reward, turn_rewards, info)


async def with_retries(ask: Ask, request: SampleRequest, retries: int) -> Sample | Invalid:
    """The sampler's answer, retried after a fault."""
    for _ in range(retries):
        answer = await ask(request)
        if not isinstance(answer, Invalid):
            return answer
    return await ask(request)


def play_all(samplers: Sequence[Sampler], plays: Sequence[Callable[..., Awaitable[T]]]) -> list[T]:
    """Run all plays and return their results in order. Each play is called with one `Ask` per sampler."""

    async def together() -> list[T]:
        round_ = _Round(len(plays))

        async def one(number: int) -> T:
            played = await plays[number](*(round_.asker(number, sampler) for sampler in samplers))
            round_.leave()  # not after an error, which ends the rollout
            return played

        tasks = [asyncio.ensure_future(one(number)) for number in range(len(plays))]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    return run_to_end(together())


class _Round:
    """Passes requests to samplers: one by one to a stream; to any other in one call once all live episodes wait,
    ordered by episode number.
    """

    def __init__(self, live: int) -> None:
        self.live = live
        self.asked: dict[int, tuple[Sampler, SampleRequest, asyncio.Future[Sample | Invalid]]] = {}

    def asker(self, number: int, sampler: Sampler) -> Ask:
        submit = getattr(sampler, "submit", None)
        if submit is not None:
            return lambda request: asyncio.wrap_future(submit(request))

        async def ask(request: SampleRequest) -> Sample | Invalid:
            answer = asyncio.get_running_loop().create_future()
            self.asked[number] = sampler, request, answer
            self._call_when_all_wait()
            return await answer

        return ask

    def leave(self) -> None:
        """An episode is over."""
        self.live -= 1
        self._call_when_all_wait()

    def _call_when_all_wait(self) -> None:
        if not self.asked or len(self.asked) < self.live:
            return
        waiting, self.asked = [self.asked[number] for number in sorted(self.asked)], {}
        for sampler in {id(sampler): sampler for sampler, _, _ in waiting}.values():
            calls = [(request, answer) for asked, request, answer in waiting if asked is sampler]
            try:
                samples = sampler.generate([request for request, _ in calls])
            except BaseException as error:
                for _, _, answer in waiting:
                    if not answer.done():
                        answer.set_exception(error)
                return
            for (_, answer), sample in zip(calls, samples, strict=True):
                answer.set_result(sample)
