"""Rollouts: episodes ask for continuations turn by turn, the sampler answers all live ones together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...data.trajectory import Invalid, Role, TokenSequence, Trajectory
from .sampler import Sample, Sampler, SampleRequest, SamplingParams


class Episode(Protocol):
    """One sample of one prompt. It hands out contexts and takes what was sampled, until it has no more to ask.

    An episode may have `forced`: tokens that the sampler puts between sampled spans, such as the actions of a video.
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


def sampled_sequence(context: Sequence[int], sample: Sample) -> TokenSequence:
    """Context and continuation as one sequence: the mask covers exactly the sampled tokens."""
    sampled = (Role.ACTION,) * len(sample.ids)
    if sample.forced is not None:
        sampled = tuple(Role.OBSERVATION if given else Role.ACTION for given in sample.forced)
    roles = (Role.PROMPT,) * len(context) + sampled
    return TokenSequence((*context, *sample.ids), roles, (0.0,) * len(context) + sample.logprobs, sample.weight_version)


def rollout(
    sampler: Sampler, episodes: Sequence[Episode], params: SamplingParams, seed: int, retries: int = 2
) -> list[Trajectory]:
    """Run all episodes to their end. A fault of the sampler is retried, then makes the trajectory Invalid; it is
    never a reward of 0.
    """
    sequences: list[list[TokenSequence]] = [[] for _ in episodes]
    faults: dict[int, Invalid] = {}
    live = list(range(len(episodes)))
    turn = 0
    while live:
        contexts = {i: context for i in live if (context := episodes[i].context()) is not None}
        pending = list(contexts)
        for attempt in range(retries + 1):
            requests = [
                SampleRequest(
                    contexts[i],
                    (seed, episodes[i].prompt_id, episodes[i].sample_index, turn),
                    params,
                    getattr(episodes[i], "forced", ()),
                )
                for i in pending
            ]
            failed = []
            for i, answer in zip(pending, sampler.generate(requests), strict=True):
                if isinstance(answer, Invalid):
                    failed.append(i)
                    if attempt == retries:
                        faults[i] = answer
                else:
                    sequences[i].append(sampled_sequence(contexts[i], answer))
                    episodes[i].receive(answer)
            pending = failed
            if not pending:
                break
        live = [i for i in contexts if i not in faults]
        turn += 1
    return [_finish(episode, sequences[i], faults.get(i)) for i, episode in enumerate(episodes)]


def _finish(episode: Episode, sequences: list[TokenSequence], fault: Invalid | None) -> Trajectory:
    if fault is not None:
        return Trajectory(episode.prompt_id, episode.sample_index, sequences, fault)
    turn_rewards, reward, info = episode.score()
    return Trajectory(episode.prompt_id, episode.sample_index, sequences, reward, turn_rewards, info)
