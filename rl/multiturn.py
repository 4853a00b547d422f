"""Episodes with worlds in the loop: the sampler answers all live ones together, worlds step concurrently, every wait
has a deadline.

A fault (of the sampler, a world that hangs or breaks, a reward that raises) makes the attempt Invalid; the episode is
then begun anew within a budget, and only when that is used up does the trajectory stay Invalid. A model's malformed
answer is no fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..data.trajectory import Invalid, Role, TokenSequence, Trajectory
from .rollout.concurrent import run_all
from .rollout.episodes import Episode, sampled_sequence
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


@dataclass
class _Run:
    make: Callable[[], Episode]
    episode: Episode | None = None
    turns: list[tuple[tuple[int, ...], Sample]] = field(default_factory=list)
    fault: Invalid | None = None
    restarts: int = 0


def rollout_worlds(
    sampler: Sampler,
    makers: Sequence[Callable[[], Episode]],
    params: SamplingParams,
    seed: int,
    limits: Limits = DEFAULT_LIMITS,
) -> list[Trajectory]:
    """Run all episodes to their end; `makers` build them, again after a fault. A begun-anew episode samples the same
    tokens.
    """
    runs = [_Run(make) for make in makers]
    names: list[tuple[int, int]] = [(-1, -1)] * len(runs)
    results: dict[int, Trajectory] = {}
    pending = list(range(len(runs)))
    while pending:
        _start([runs[i] for i in pending], limits)
        for i in pending:
            if (episode := runs[i].episode) is not None:
                names[i] = (episode.prompt_id, episode.sample_index)
        _play(sampler, [runs[i] for i in pending], params, seed, limits)
        again = []
        scores = run_all(
            [_score(runs[i]) for i in pending], workers=limits.workers, deadline_s=limits.reward_s, what="reward"
        )
        for i, scored in zip(pending, scores, strict=True):
            run = runs[i]
            fault = scored if isinstance(scored, Invalid) else scored[1] if isinstance(scored[1], Invalid) else None
            if fault is not None and run.restarts < limits.restarts:
                runs[i] = _Run(run.make, restarts=run.restarts + 1)
                again.append(i)
                continue
            turn_rewards, reward, info = ([], scored, {}) if isinstance(scored, Invalid) else scored
            info = {**info, "restarts": run.restarts} if run.restarts else info
            results[i] = Trajectory(
                *names[i], joined(run.turns), reward if fault is None else fault, turn_rewards, info
            )
        pending = again
    return [results[i] for i in range(len(runs))]


def _start(runs: list[_Run], limits: Limits) -> None:
    made = run_all([run.make for run in runs], workers=limits.workers, deadline_s=limits.world_s, what="world reset")
    for run, episode in zip(runs, made, strict=True):
        if isinstance(episode, Invalid):
            run.fault = episode
        else:
            run.episode = episode


def _play(sampler: Sampler, runs: list[_Run], params: SamplingParams, seed: int, limits: Limits) -> None:
    live = [run for run in runs if run.fault is None]
    for turn in range(limits.max_turns):
        contexts = run_all([r.episode.context for r in live], workers=1, deadline_s=limits.world_s, what="context")  # type: ignore[union-attr]
        asking: list[tuple[_Run, tuple[int, ...]]] = []
        for run, context in zip(live, contexts, strict=True):
            if isinstance(context, Invalid):
                run.fault = context
            elif context is not None:
                asking.append((run, context))
        if not asking:
            return
        answered = _sample(sampler, asking, params, seed, turn, limits)
        steps = [(lambda r=run, s=sample: r.episode.receive(s)) for run, _, sample in answered]  # type: ignore[union-attr]
        taken = run_all(steps, workers=limits.workers, deadline_s=limits.world_s, what="world step")
        for (run, context, sample), outcome in zip(answered, taken, strict=True):
            run.turns.append((context, sample))
            if isinstance(outcome, Invalid):
                run.fault = outcome
        live = [run for run, _, _ in answered if run.fault is None]
    for run in live:
        run.fault = Invalid(f"episode: not over after max_turns = {limits.max_turns}")


def _sample(
    sampler: Sampler,
    asking: list[tuple[_Run, tuple[int, ...]]],
    params: SamplingParams,
    seed: int,
    turn: int,
    limits: Limits,
) -> list[tuple[_Run, tuple[int, ...], Sample]]:
    answers: dict[int, Sample] = {}
    pending = list(range(len(asking)))
    for attempt in range(limits.retries + 1):
        requests = []
        for i in pending:
            run, context = asking[i]
            assert run.episode is not None
            requests.append(
                SampleRequest(context, (seed, run.episode.prompt_id, run.episode.sample_index, turn), params)
            )
        failed = []
        for i, answer in zip(pending, sampler.generate(requests), strict=True):
            if not isinstance(answer, Invalid):
                answers[i] = answer
            else:
                failed.append(i)
                if attempt == limits.retries:
                    asking[i][0].fault = answer
        pending = failed
        if not pending:
            break
    return [(asking[i][0], asking[i][1], sample) for i, sample in sorted(answers.items())]


def _score(run: _Run) -> Callable[[], tuple[list[float], float | Invalid, dict]]:
    def score() -> tuple[list[float], float | Invalid, dict]:
        if run.fault is not None:
            return [], run.fault, {}
        assert run.episode is not None
        return run.episode.score()

    return score


def joined(turns: Sequence[tuple[tuple[int, ...], Sample]]) -> list[TokenSequence]:
    """Turns as sequences. A context that goes on from all that came before extends its sequence: what the world added
    is OBSERVATION, what was sampled ACTION. Any other context (a window that moved) begins a sequence of its own."""
    sequences: list[TokenSequence] = []
    for context, sample in turns:
        last = sequences[-1] if sequences else None
        if last is not None and len(context) >= len(last.ids) and context[: len(last.ids)] == last.ids:
            fresh = sampled_sequence(context[len(last.ids) :], sample)
            roles = tuple(Role.OBSERVATION if role == Role.PROMPT else role for role in fresh.roles)
            version = min(last.weight_version, fresh.weight_version)  # the oldest decides how stale it is
            sequences[-1] = TokenSequence(
                last.ids + fresh.ids, last.roles + roles, last.logprobs + fresh.logprobs, version
            )
        else:
            sequences.append(sampled_sequence(context, sample))
    return sequences
