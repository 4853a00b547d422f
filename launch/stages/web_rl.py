"""On-policy multi-turn RL of a web agent: GRPO, or any other algorithm, on episodes that the current weights play."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.rng import fold, permutation
from ...data.trajectory import Invalid, Trajectory
from ...rl.multiturn import Limits, rollout_worlds
from ...rl.rollout.sampler import Sampler, SamplingParams
from ...rl.webrl.episode import WebEpisode
from ...rl.worlds.web.generate import SiteTask
from ..job import Job
from ..settings.web_live import WebReinforce
from .on_policy import Drill, practise
from .web import Players, make_world, pool_of, prompter_of, read_tasks, start_of

LIMITS = Limits(workers=4, max_turns=200)


@dataclass
class WebSeat:
    """A place in a step: a task and a sample of it. `episode` is the last one begun there; a fault may have begun several."""

    task: SiteTask
    prompt_id: int
    sample_index: int
    episode: WebEpisode | None = None


def deal(tasks: Sequence[SiteTask], groups: int, samples: int, step: int, seed: int) -> list[WebSeat]:
    """The seats of one step: every task comes once before any comes again, in a fresh order every time."""
    places = range(step * groups, (step + 1) * groups)
    chosen = [(place, permutation(len(tasks), seed, place // len(tasks))[place % len(tasks)]) for place in places]
    return [WebSeat(tasks[which], place, sample) for place, which in chosen for sample in range(samples)]


def run(stage: WebReinforce, job: Job) -> dict[str, Any]:
    """Train to the last step; say how many episodes it played, how many of them succeeded, and how many actions they took."""
    tasks = read_tasks(job, stage.tasks) if stage.tasks else pool_of(start_of(job))
    players = Players(job)
    counts = {"episodes": 0, "successes": 0, "actions": 0}

    def seats_of(step: int) -> list[WebSeat]:
        return list(job.mesh.share(deal(tasks, stage.prompts_per_step, stage.samples_per_prompt, step, fold(job.recipe.seed, 61))))

    def play(sampler: Sampler, seats: list[WebSeat], params: SamplingParams, seed: int) -> list[Trajectory]:
        found: list[Trajectory] = []
        for at in range(0, len(seats), stage.at_once):
            part = seats[at : at + stage.at_once]
            while len(players.worlds) < len(part):  # before threads ask for them
                players.worlds.append(make_world(start_of(job)))
            makers = [_maker(players, place, seat) for place, seat in enumerate(part)]
            found += rollout_worlds(sampler, makers, params, seed, LIMITS)
        return found

    def measure(sampler: Sampler, step: int, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        good = [t for t in trajectories if not isinstance(t.reward, Invalid)]
        mine = {"episodes": len(good), "successes": sum(t.info["success"] for t in good), "actions": sum(t.info["steps"] for t in good)}
        fresh = {name: sum(part[name] for part in job.mesh.gather(mine)) for name in mine}
        for name, value in fresh.items():
            counts[name] += value
        played = max(fresh["episodes"], 1)
        return {"web/success": fresh["successes"] / played, "web/steps": fresh["actions"] / played, **counts}

    drill = Drill(
        params=SamplingParams(start_of(job).max_new_tokens, stage.temperature, stop_ids=(prompter_of(job).stop_id,)),
        microbatch_tokens=stage.microbatch_tokens,
        episodes_of=seats_of,
        progress=lambda values: f"success {values['web/success']:.3f}",
        turns=_turns,
        measure=measure,
        play=play,
        counts=counts,
    )
    return {"tasks": len(tasks), **practise(stage, job, drill)}


def _maker(players: Players, place: int, seat: WebSeat) -> Callable[[], WebEpisode]:
    def make() -> WebEpisode:
        seat.episode = players.episode(place, seat.task, seat.prompt_id, seat.sample_index)
        return seat.episode

    return make


def _turns(seat: WebSeat) -> list[dict[str, Any]]:
    """The rounds of an episode as the report shows them: the page before each action, what was written, and the next page."""
    rounds = seat.episode.rounds if seat.episode else []
    after = [html for _, _, html, _, _ in rounds[1:]] + [rounds[-1][2] if rounds else ""]
    return [
        {"prompt": html, "action": response, "prediction": "", "truth": page, "exact": False}
        for (_, _, html, response, _), page in zip(rounds, after, strict=False)
    ]
