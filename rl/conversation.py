"""Episodes in text: an environment says something, the model answers, until the environment gives a score.

Nothing sampled is tokenised again: a later context repeats earlier answers by their ids, and only what the environment
says is encoded.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from ..core.errors import LengthError
from ..data.tokenizers import Tokenizer
from ..data.trajectory import Invalid, Trajectory
from .chat import first_ids, turns_of
from .environment import End, Prompt
from .language import readable
from .multiturn import joined
from .rollout.episodes import Ask, play_all, with_retries
from .rollout.sampler import Sample, Sampler, SampleRequest, SamplingParams

RETRIES = 2  # of one continuation by the sampler


class EpisodeHost(Protocol):
    """Plays episodes: an environment in a process of its own, or rows of data with a reward. Once more than
    `max_invalid` of the episodes asked for are Invalid, the rest may be returned as Invalid without waiting.
    """

    def start_many(self, asked: Sequence[tuple[int, Any]], max_invalid: float = math.inf, /) -> list[Prompt | End]:
        """Start episodes, each given as (number, task): its first prompt, or its end."""
        ...

    def answer_many(self, answers: Sequence[tuple[int, str]], max_invalid: float = math.inf, /) -> list[Prompt | End]:
        """Pass on the model's answers: the next prompt of each episode, or its end."""
        ...


@dataclass
class Conversation:
    """One sample of one task, as a rollout fills it."""

    task: Any
    prompt_id: int
    sample_index: int
    prompts: list[Prompt] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    turns: list[tuple[tuple[int, ...], Sample]] = field(default_factory=list)
    end: End | None = None

    def observe(self, said: Prompt | End) -> None:
        """Record what the environment says next."""
        if isinstance(said, End):
            self.end = said
        else:
            self.prompts.append(said)


@dataclass(frozen=True)
class Conversations:
    """Plays conversations with a sampler: prompts come from the host, the tokenizer's chat template frames them."""

    host: EpisodeHost
    tokenizer: Tokenizer
    max_turns: int = 100
    max_length: int | None = None  # of context and answer; an episode that outgrows it ends as Invalid
    # episodes of one rollout never share a number with another's
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def converse(
        self,
        sampler: Sampler,
        asked: Sequence[Conversation],
        params: SamplingParams,
        seed: int,
        max_invalid: float = math.inf,
    ) -> list[Trajectory]:
        """Play all conversations to their end. A stream answers each conversation on its own; any other sampler
        answers all live ones in one batch per turn. With more than `max_invalid` Invalid, the caller uses none.
        """

        def invalid_left() -> float:
            return max_invalid - sum(talk.end is not None and isinstance(talk.end.reward, Invalid) for talk in asked)

        numbers = [next(self.numbers) for _ in asked]
        if hasattr(sampler, "submit") and not getattr(self.host, "together", False):
            return self._independently(sampler, dict(zip(numbers, asked, strict=True)), params, seed, invalid_left)
        tasks = [(number, talk.task) for number, talk in zip(numbers, asked, strict=True)]
        first = self.host.start_many(tasks, invalid_left())
        for talk, said in zip(asked, first, strict=True):
            talk.observe(said)
        live = [i for i, talk in enumerate(asked) if talk.end is None]
        for turn in range(self.max_turns):
            contexts = {i: self.context(asked[i]) for i in live}
            for i in [
                i for i in live if self.max_length and len(contexts[i]) + params.max_new_tokens > self.max_length
            ]:
                asked[i].end = self._too_long(asked[i], len(contexts[i]), params)
            sampled = self._sample(
                sampler, {i: (asked[i], contexts[i]) for i in live if asked[i].end is None}, params, seed, turn
            )
            for i, answer in sampled.items():
                self._take(asked[i], contexts[i], answer)
            replies = self.host.answer_many([(numbers[i], asked[i].answers[-1]) for i in sampled], invalid_left())
            for i, said in zip(sampled, replies, strict=True):
                asked[i].observe(said)
            live = [i for i in sampled if asked[i].end is None]
            if not live:
                break
        for i in live:
            asked[i].end = self._endless()
        return [self._finished(talk) for talk in asked]

    def _independently(
        self,
        sampler: Sampler,
        asked: dict[int, Conversation],
        params: SamplingParams,
        seed: int,
        invalid_left: Callable[[], float],
    ) -> list[Trajectory]:
        """Each conversation continues as soon as its own answer is there."""
        lanes: list[_Lane] = []

        async def play(number: int, talk: Conversation, ask: Ask) -> Trajectory:
            if not lanes:
                lanes.append(_Lane(invalid_left))
            talk.observe(await lanes[0](self.host.start_many, (number, talk.task)))
            for turn in range(self.max_turns):
                if talk.end is not None:
                    break
                context = self.context(talk)
                if self.max_length and len(context) + params.max_new_tokens > self.max_length:
                    talk.end = self._too_long(talk, len(context), params)
                    break
                key = (seed, talk.prompt_id, talk.sample_index, turn)
                answer = await with_retries(ask, SampleRequest(context, key, params), RETRIES)
                if isinstance(answer, Invalid):
                    talk.end = End(answer)
                    break
                self._take(talk, context, answer)
                talk.observe(await lanes[0](self.host.answer_many, (number, talk.answers[-1])))
            if talk.end is None:
                talk.end = self._endless()
            return self._finished(talk)

        try:
            return play_all([sampler], [partial(play, number, talk) for number, talk in asked.items()])
        finally:
            for lane in lanes:
                lane.thread.shutdown(wait=False)

    def _take(self, talk: Conversation, context: tuple[int, ...], answer: Sample) -> None:
        talk.turns.append((context, answer))
        ended = answer.ids[-1:] and answer.ids[-1] in self.tokenizer.stop_ids
        talk.answers.append(readable(self.tokenizer, answer.ids[:-1] if ended else answer.ids))

    def _endless(self) -> End:
        return End(Invalid(f"the episode was not over after max_turns = {self.max_turns} answers"))

    def _too_long(self, talk: Conversation, length: int, params: SamplingParams) -> End:
        if not talk.turns:
            raise LengthError(
                f"a prompt of {length} tokens and max_new_tokens = {params.max_new_tokens} exceed model.max_positions "
                f"= {self.max_length}; lower max_new_tokens, or shorten the prompt. It is that of task "
                f"{str(talk.task)[:200]}, and begins with {text_of(talk.prompts[0])[:80]!r}"
            )
        return End(Invalid(f"the conversation grew longer than model.max_positions = {self.max_length}"))

    def context(self, talk: Conversation) -> tuple[int, ...]:
        """Ids to continue from: the last context, the sampled ids of its answer, and what was said since."""
        if not talk.turns:
            return tuple(first_ids(self.tokenizer, talk.prompts[0]))
        before, sample = talk.turns[-1]
        ids = (*before, *sample.ids)
        agent, next_user = turns_of(self.tokenizer)
        said = self.tokenizer.encode(next_user + text_of(talk.prompts[-1]) + agent)
        # The template's end of the model's turn is not repeated where the sampler already wrote it.
        return (*ids, *(said[1:] if ids[-1] == said[0] else said))

    @staticmethod
    def _sample(
        sampler: Sampler,
        asked: dict[int, tuple[Conversation, tuple[int, ...]]],
        params: SamplingParams,
        seed: int,
        turn: int,
    ) -> dict[int, Sample]:
        answers: dict[int, Sample] = {}
        pending = list(asked)
        for attempt in range(RETRIES + 1):
            requests = [
                SampleRequest(context, (seed, talk.prompt_id, talk.sample_index, turn), params)
                for talk, context in (asked[i] for i in pending)
            ]
            failed = []
            for i, answer in zip(pending, sampler.generate(requests) if requests else [], strict=True):
                if not isinstance(answer, Invalid):
                    answers[i] = answer
                    continue
                failed.append(i)
                if attempt == RETRIES:
                    asked[i][0].end = End(answer)
            pending = failed
            if not pending:
                break
        return {i: answers[i] for i in asked if i in answers}

    @staticmethod
    def _finished(talk: Conversation) -> Trajectory:
        assert talk.end is not None
        reward = talk.end.reward
        valid = not isinstance(reward, Invalid)
        rewards = [0.0] * (len(talk.turns) - 1) + [float(reward)] if valid and talk.turns else []
        return Trajectory(talk.prompt_id, talk.sample_index, joined(talk.turns), reward, rewards, dict(talk.end.parts))


class _Lane:
    """Calls the host from a thread, one call at a time; items that arrive meanwhile share the next call. Hosts enforce
    their own deadlines.
    """

    def __init__(self, invalid_left: Callable[[], float]) -> None:
        self.invalid_left, self.thread = invalid_left, ThreadPoolExecutor(1, thread_name_prefix="host")
        self.waiting: list[tuple[Callable[..., list[Any]], tuple[int, Any], asyncio.Future[Any]]] = []
        self.working: asyncio.Task[None] | None = None

    async def __call__(self, call: Callable[..., list[Any]], item: tuple[int, Any]) -> Any:
        """The answer to one item."""
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((call, item, answer))
        if self.working is None:
            self.working = asyncio.ensure_future(self._work())
        return await answer

    async def _work(self) -> None:
        while self.waiting:
            call = self.waiting[0][0]
            now = [one for one in self.waiting if one[0] == call]
            self.waiting = [one for one in self.waiting if one[0] != call]
            items = [item for _, item, _ in now]
            try:
                said = await asyncio.get_running_loop().run_in_executor(self.thread, call, items, self.invalid_left())
            except Exception as error:
                for _, _, answer in now:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, _, answer), one in zip(now, said, strict=True):
                if not answer.done():  # its conversation was cancelled
                    answer.set_result(one)
        self.working = None


def text_of(prompt: Prompt) -> str:
    """A prompt as one text, for a report or for a turn after the first."""
    return prompt if isinstance(prompt, str) else "\n\n".join(m["content"] for m in prompt)


class Scripted:
    """Answers from a function in place of a model: demonstrations to imitate, and trivial policies. No log-prob is
    known.
    """

    def __init__(self, tokenizer: Tokenizer, answer: Callable[[int, int], str | Invalid]) -> None:
        self.tokenizer, self.answer = tokenizer, answer

    def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]:
        """The answer to (prompt id, turn), closed by the end of text."""
        return [self._sample(self.answer(request.key[1], request.key[3])) for request in requests]

    def _sample(self, answer: str | Invalid) -> Sample | Invalid:
        if isinstance(answer, Invalid):
            return answer
        ids = (*self.tokenizer.encode(answer), self.tokenizer.eos_id)
        return Sample(ids, (0.0,) * len(ids), "stop", 0)


def shown(talk: Conversation, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """A conversation as the report shows it: the prompt as the model read it, its answer, and the right one where
    the task has it.
    """
    turns = []
    for (context, _), answer in zip(talk.turns, talk.answers, strict=True):
        turns.append(
            {"context": readable(tokenizer, context, keep_special=True), "action": "", "answer": answer, "after": ""}
        )
    if turns and talk.end is not None and not isinstance(talk.end.reward, Invalid):
        turns[-1]["reward"] = talk.end.reward
    return turns
