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
from .on_policy import StageTrainer
from .web import Players, begin_phase, make_world, pool_of, prompter_of, read_tasks, start_of

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
    trainer = WebTrainer(stage, job)
    return {"tasks": len(trainer.tasks), **trainer.train()}


class WebTrainer(StageTrainer):
    """RL of a web agent on the tasks of its sites."""

    can_refill = False  # the counts are of a step's own episodes

    def __init__(self, stage: WebReinforce, job: Job) -> None:
        begin_phase(job)
        self.web, self.players = stage, Players(job)
        self.tasks = read_tasks(job, stage.tasks) if stage.tasks else pool_of(start_of(job))
        params = SamplingParams(start_of(job).max_new_tokens, stage.temperature, stop_ids=prompter_of(job).stop_ids)
        super().__init__(stage, job, params, stage.microbatch_tokens)

    def deal(self, number: int) -> list[WebSeat]:
        seed = fold(self.job.recipe.seed, 61)
        return list(self.mesh.share(deal(self.tasks, self.stage.prompts_per_step, self.stage.samples_per_prompt, number, seed)))

    def play(self, sampler: Sampler, episodes: list[WebSeat], seed: int) -> list[Trajectory]:
        played: dict[int, Trajectory] = {}
        for part in self.players.parts(list(enumerate(episodes)), lambda placed: placed[1].task, self.web.at_once):
            while len(self.players.worlds) < len(part):  # before threads ask for them
                self.players.worlds.append(make_world(start_of(self.job)))
            makers = [_maker(self.players, place, seat) for place, (_, seat) in enumerate(part)]
            found = rollout_worlds(sampler, makers, self.params, seed, LIMITS)
            played.update(zip((number for number, _ in part), found, strict=True))
        return [played[number] for number in range(len(episodes))]

    def measure(self, step: int, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        good = [t for t in trajectories if not isinstance(t.reward, Invalid)]
        here = {"episodes": len(good), "successes": sum(t.info["success"] for t in good), "actions": sum(t.info["steps"] for t in good)}
        parts = self.mesh.gather(here)
        fresh = {name: sum(part[name] for part in parts) for name in here}
        for name, value in fresh.items():
            self.counts[name] += value
        played = max(fresh["episodes"], 1)
        return {"web/success": fresh["successes"] / played, "web/steps": fresh["actions"] / played, **self.counts}

    def progress(self, values: dict[str, Any]) -> str:
        return f"success {values['web/success']:.3f}"

    def turns(self, episode: WebSeat) -> list[dict[str, Any]]:
        return _turns(episode)

    def counted(self) -> tuple[str, ...]:
        return ("episodes", "successes", "actions")


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
