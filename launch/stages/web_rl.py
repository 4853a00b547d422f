"""On-policy multi-turn RL of a web agent: GRPO, or any other algorithm, on episodes that the current weights play."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.batch import PackedBatch
from ...core.errors import ConfigError
from ...core.progress import Progress
from ...core.rng import fold, permutation
from ...data.trajectory import Invalid, Trajectory
from ...rl.loop import Hooks, reinforce
from ...rl.multiturn import Limits, rollout_worlds
from ...rl.objective import logprob_score
from ...rl.rollout.sampler import Sample, Sampler, SamplingParams
from ...rl.webrl.episode import WebEpisode
from ...rl.worlds.web.generate import SiteTask
from ..job import Job
from ..settings.web_live import WebReinforce
from .common import Checkpoints, build_engine
from .reinforce import SHOWN
from .session import open_session
from .web import Players, make_world, pool_of, prompter_of, read_tasks, start_of

LIMITS = Limits(workers=4, max_turns=200)


@dataclass
class Seat:
    """A place in a step: a task and a sample of it. `episode` is the last one begun there; a fault may have begun several."""

    task: SiteTask
    prompt_id: int
    sample_index: int
    episode: WebEpisode | None = None

    def context(self) -> tuple[int, ...] | None:
        return self.episode.context() if self.episode else None

    def receive(self, sample: Sample) -> None:
        assert self.episode is not None
        self.episode.receive(sample)

    def score(self) -> tuple[list[float], float | Invalid, dict[str, Any]]:
        assert self.episode is not None
        return self.episode.score()


def deal(tasks: Sequence[SiteTask], groups: int, samples: int, step: int, seed: int) -> list[Seat]:
    """The seats of one step: every task comes once before any comes again, in a fresh order every time."""
    places = range(step * groups, (step + 1) * groups)
    chosen = [(place, permutation(len(tasks), seed, place // len(tasks))[place % len(tasks)]) for place in places]
    return [Seat(tasks[which], place, sample) for place, which in chosen for sample in range(samples)]


def run(stage: WebReinforce, job: Job) -> dict[str, Any]:
    """Train to the last step; say how many episodes succeeded on the way and how many actions and gradient tokens it took."""
    if stage.prompts_per_step % job.ranks:
        raise ConfigError(f"stages: {stage.name}.prompts_per_step = {stage.prompts_per_step} must be a multiple of the {job.ranks} ranks")
    tasks = read_tasks(job, stage.tasks) if stage.tasks else pool_of(start_of(job))
    players, prompter = Players(job), prompter_of(job)
    params = SamplingParams(start_of(job).max_new_tokens, stage.temperature, stop_ids=(prompter.stop_id,))
    engine, frozen = build_engine(job, stage.optimizer, stage.init), build_engine(job, None, stage.init)
    checkpoints = Checkpoints(job, stage.name, stage.checkpoint_every, stage.steps)
    start, extra = checkpoints.resume(engine)
    counts = {name: extra.get(name, 0) for name in ("actions", "episodes", "successes")}
    progress = Progress(stage.name, stage.steps, start=start, speak=job.speaks)

    def seats_of(step: int) -> list[Any]:
        return list(job.share(deal(tasks, stage.prompts_per_step, stage.samples_per_prompt, step, fold(job.recipe.seed, 61))))

    def play(sampler: Sampler, seats: list[Any], params: SamplingParams, seed: int) -> list[Trajectory]:
        found: list[Trajectory] = []
        for at in range(0, len(seats), stage.at_once):
            part = seats[at : at + stage.at_once]
            while len(players.worlds) < len(part):  # before threads ask for them
                players.worlds.append(make_world(start_of(job)))

            def maker(place: int, seat: Seat) -> Any:
                def make() -> WebEpisode:
                    seat.episode = players.episode(place, seat.task, seat.prompt_id, seat.sample_index)
                    return seat.episode

                return make

            found += rollout_worlds(sampler, [maker(i, seat) for i, seat in enumerate(part)], params, seed, LIMITS)
        return found

    def reference(batches: list[PackedBatch]) -> list[torch.Tensor]:
        return [r["logprob"] for r in frozen.score(batches, logprob_score(stage.temperature))]

    def record(step: int, values: dict[str, Any], seats: Sequence[Any], trajectories: Sequence[Trajectory]) -> None:
        good = [t for t in trajectories if not isinstance(t.reward, Invalid)]
        mine = {"actions": sum(t.info["steps"] for t in good), "episodes": len(good), "successes": sum(t.info["success"] for t in good)}
        fresh = {name: sum(part[name] for part in job.gather(mine)) for name in mine}
        for name, value in fresh.items():
            counts[name] += value
        values = session.observe(step, values, trajectories, limit=params.max_new_tokens)
        played = max(fresh["episodes"], 1)
        values = {
            **values,
            "web/success": fresh["successes"] / played,
            "web/steps": fresh["actions"] / played,
            "actions": counts["actions"],
        }
        if not job.speaks:
            return
        job.run.metrics.append(stage.name, step + 1, values)
        if step % stage.rollouts_every == 0 or step + 1 == stage.steps:
            job.run.write_rollouts(stage.name, step + 1, _picture(step + 1, seats, trajectories))
        progress.update(step + 1, f"success {values['web/success']:.3f}")

    with open_session(job, stage.name, engine, stage.rollouts, start, extra) as session:
        write = session.saving(checkpoints)
        tokens = reinforce(
            engine,
            session.sampler,
            session.issuing(seats_of),
            stage.algorithm,
            params,
            Hooks(job.gather, record, lambda step, state: write(step, {**state, **counts})),
            steps=range(start, stage.steps),
            tokens=extra.get("tokens", 0),
            microbatch_tokens=stage.microbatch_tokens,
            drift_gate=stage.drift_gate,
            seed=fold(job.recipe.seed, 62),
            reference=reference,
            kl_every=stage.rollouts_every,
            critic=session.with_critic(stage.algorithm, stage.critic, stage.init, checkpoints, start),
            ahead=session.ahead,
            publish=session.publish,
            rollout_deadline_s=stage.rollouts.deadline_s,
            rest=session.rest,
            play=play,
        )
    return {**counts, "tokens": tokens, "tasks": len(tasks), "steps": stage.steps, "checkpoint": checkpoints.final()}


def _picture(step: int, seats: Sequence[Seat], trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """A few episodes as the report shows them: the page before each action, and what was written."""
    rows = []
    for seat, t in list(zip(seats, trajectories, strict=True))[:SHOWN]:
        rounds = seat.episode.rounds if seat.episode else []
        after = [html for _, _, html, _, _ in rounds[1:]] + [rounds[-1][2] if rounds else ""]
        turns = [
            {"prompt": html, "action": response, "prediction": "", "truth": page, "exact": False}
            for (_, _, html, response, _), page in zip(rounds, after, strict=False)
        ]
        invalid = t.reward.reason if isinstance(t.reward, Invalid) else None
        reward = None if isinstance(t.reward, Invalid) else t.reward
        rows.append(
            {"step": step, "prompt_id": t.prompt_id, "sample": t.sample_index, "reward": reward, "invalid": invalid, "turns": turns}
        )
    return rows
