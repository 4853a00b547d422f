"""What WebRL's stages share: tasks, worlds and prompts of the recipe's start, rollouts, scoring over ranks, and one training loop."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ...core.engine import Engine, LossFn, ScoreFn
from ...core.errors import ConfigError
from ...core.progress import Progress
from ...core.rng import fold, permutation
from ...data.balance import spread
from ...data.packing import TrainSequence
from ...data.tokenizers import Tokenizer, load_tokenizer
from ...data.trajectory import Invalid
from ...rl.multiturn import Limits, rollout_worlds
from ...rl.rollout.sampler import Sampler, SamplingParams
from ...rl.values import require_finite
from ...rl.webrl.episode import WebEpisode
from ...rl.webrl.prompts import Prompter
from ...rl.webrl.steps import WebTrajectory, read_trajectories
from ...rl.worlds.tasks import Task, load_tasks
from ...rl.worlds.web.generate import SiteTask
from ...rl.worlds.web.hosted import HostedWorld
from ...rl.worlds.web.reset import parts, run_reset
from ...rl.worlds.web.tasks import parse_task
from ...rl.worlds.web.world import WebWorld
from ..job import Job
from ..settings.web import Training, WebStart
from .common import Checkpoints

TOKENIZER, STEPS, TASKS = "tokenizer", "steps", "tasks.json"
SHOWN = 12  # episodes of a stage that a report shows page by page


def start_of(job: Job) -> WebStart:
    """The recipe's start."""
    found = [stage for stage in job.recipe.stages if isinstance(stage, WebStart)]
    if len(found) != 1:
        raise ConfigError(f"stages: web stages need exactly one stage of kind web-start, not {len(found)}")
    return found[0]


@lru_cache(maxsize=2)
def _load(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def prompter_of(job: Job, verdict: bool = False) -> Prompter:
    """Prompts with the start's tokenizer and lengths."""
    start = start_of(job)
    limit = start.max_verdict_tokens if verdict else start.max_prompt_tokens
    return Prompter(_load(job.stage_folder(start.name) / TOKENIZER), limit, start.pad_prompts_to)


@lru_cache(maxsize=2)
def _tags(files: tuple[str, ...]) -> dict[str, Task]:
    return load_tasks(*files)


def _tag(start: WebStart, test: bool) -> Task:
    tag = start.test_tag if test else start.tag
    known = _tags(tuple(start.tag_files))
    if tag not in known or known[tag].world != "web":
        raise ConfigError(f"tag: '{tag}' is no tag of a web world; see rl/worlds/tags.yaml and tag_files")
    return known[tag]


def uses_browser(start: WebStart) -> bool:
    """Whether the training tasks are played in Chromium."""
    return _tag(start, False).config["backend"] == "chromium"


def lives_elsewhere(start: WebStart, test: bool = False) -> bool:
    """Whether the tasks are of a file, on sites that are not ours and keep what is done to them."""
    return _tag(start, test).config["source"] == "file"


def make_world(start: WebStart, test: bool = False) -> WebWorld:
    """A world of the training or of the test tag."""
    tag = _tag(start, test)
    if tag.config["backend"] == "chromium":  # stages call worlds from several threads
        return HostedWorld(**tag.config)
    world = tag.make()
    assert isinstance(world, WebWorld)
    return world


def pool_of(start: WebStart, test: bool = False) -> list[SiteTask]:
    """All tasks of the training or of the test tag, of the chosen templates."""
    tasks = [t for t in make_world(start, test).tasks if not start.templates or t.task.template_id in start.templates]
    if not tasks:
        raise ConfigError(f"templates: no task of {start.templates} under the tag '{start.test_tag if test else start.tag}'")
    return tasks


def write_tasks(path: Path, tasks: Sequence[SiteTask]) -> None:
    """Tasks as a later stage reads them."""
    path.write_text(json.dumps([{"record": dict(t.task.raw), "steps": t.steps} for t in tasks], ensure_ascii=False), encoding="utf-8")


def strip(seat: tuple[int, SiteTask, int], episode: WebEpisode) -> dict[str, Any]:
    """An episode for the report: every page, and what was written on it."""
    task = episode.task.task
    turns = [{"prompt": f"{task.intent}\n\n{html}", "action": response} for _, _, html, response, _ in episode.rounds]
    told = {"task_id": task.task_id, "site": task.sites[0], "steps": len(turns), "answer": episode.world.answer}
    return {"prompt_id": task.intent, "sample": seat[2], "reward": max(0.0, episode.world.score), "turns": turns, **told}


def read_tasks(job: Job, stage: str) -> list[SiteTask]:
    """The tasks that a stage left."""
    held = json.loads((job.stage_folder(stage) / TASKS).read_text(encoding="utf-8"))
    return [SiteTask(parse_task(row["record"]), "train", tuple(tuple(s) for s in row["steps"])) for row in held]


def read_steps(job: Job, stage: str) -> list[WebTrajectory]:
    """The trajectories that a stage left; their keys say where they come from."""
    return [replace(t, key=f"{stage}/{t.key}") for t in read_trajectories(job.stage_folder(stage) / STEPS)]


def begin_phase(job: Job, test: bool = False) -> None:
    """Bring the sites of a task file back before a stage plays on them, by the user's command; one rank does it."""
    tag = _tag(start_of(job), test)
    command = tag.config["reset_phase_command"]
    if command:
        sites = sorted({site for task in pool_of(start_of(job), test) for site in task.task.sites})
        job.mesh.from_main(lambda: run_reset(command, sites, "", tag.config["reset_deadline_s"]))


class Players:
    """Worlds that are used again: starting one anew costs more than an episode."""

    def __init__(self, job: Job, test: bool = False) -> None:
        self.start, self.test, self.prompter, self.ranks = start_of(job), test, prompter_of(job), job.mesh.data_size
        self.worlds: list[WebWorld] = []

    def parts(self, seats: Sequence[Any], task_of: Callable[[Any], SiteTask], at_once: int) -> list[list[Any]]:
        """Seats that may be open together. The limits of sites and accounts hold over all ranks that play."""
        config = _tag(self.start, self.test).config
        limits = [int(config[name]) for name in ("at_once_per_site", "at_once_per_account")]
        for name, limit in zip(("at_once_per_site", "at_once_per_account"), limits, strict=True):
            if 0 < limit < self.ranks:
                raise ConfigError(f"{name}: {limit} is below the {self.ranks} ranks that play at once; raise it, or use fewer data ranks")
        return parts(seats, lambda seat: task_of(seat).task, at_once, *(limit // self.ranks for limit in limits))

    def episode(self, place: int, task: SiteTask, prompt_id: int, sample: int) -> WebEpisode:
        while len(self.worlds) <= place:
            self.worlds.append(make_world(self.start, self.test))
        return WebEpisode(self.worlds[place], task, prompt_id, sample, self.prompter)

    def play(
        self, sampler: Sampler, seats: Sequence[tuple[int, SiteTask, int]], temperature: float, seed: int, at_once: int, note: Callable
    ) -> list[tuple[tuple[int, SiteTask, int], WebEpisode | Invalid]]:
        """All seats (prompt id, task, sample) to the end of their episodes, `at_once` at a time; `note(seat, episode)` sees each before
        its world is used again."""
        params = SamplingParams(self.start.max_new_tokens, temperature, stop_ids=self.prompter.stop_ids)
        limits = Limits(workers=4, max_turns=200)
        found: list[tuple[tuple[int, SiteTask, int], WebEpisode | Invalid]] = []
        for part in self.parts(seats, lambda seat: seat[1], at_once):
            episodes: dict[int, WebEpisode] = {}

            def maker(place: int, seat: tuple[int, SiteTask, int], into: dict[int, WebEpisode] = episodes) -> Callable[[], WebEpisode]:
                def make() -> WebEpisode:
                    into[place] = self.episode(place, seat[1], seat[0], seat[2])
                    return into[place]

                return make

            while len(self.worlds) < len(part):
                self.worlds.append(make_world(self.start, self.test))
            played = rollout_worlds(sampler, [maker(i, seat) for i, seat in enumerate(part)], params, seed, limits)
            for i, (seat, result) in enumerate(zip(part, played, strict=True)):
                if isinstance(result.reward, Invalid):
                    found.append((seat, result.reward))
                else:
                    note(seat, episodes[i])
                    found.append((seat, episodes[i]))
        return found


def score_all(job: Job, engine: Engine, rows: Sequence[TrainSequence], score: ScoreFn, budget: int) -> dict[str, dict[int, np.ndarray]]:
    """Per-token results of all rows by name and row, each data rank scoring its part."""
    longest = max(len(row.ids) for row in rows)
    shared = spread(job.mesh.share(rows), max(budget, longest), job.mesh, job.model.hidden)
    scored = engine.score(shared.batches, score)
    mine = {name: shared.bring_home([s[name] for s in scored]) for name in scored[0]}
    parts = job.mesh.gather(mine)
    return {name: dict(enumerate(v for part in parts for v in part[name])) for name in mine}


def fit(
    job: Job,
    stage: str,
    engine: Engine,
    training: Training,
    count: int,
    rows: Callable[[list[int], list[int]], list[TrainSequence]],
    loss: LossFn,
    describe: Callable[[dict[str, float]], dict[str, float]],
) -> dict[str, Any]:
    """Train on `count` items in a fresh order every epoch. `rows(mine, whole)` makes this rank's sequences of a step, `whole` being all
    of the step's items. Resumes from the stage's newest checkpoint."""
    steps = max(1, round(training.epochs * count / training.sequences_per_step))
    checkpoints = Checkpoints(job, stage, training.checkpoint_every, steps)
    begin, _ = checkpoints.resume(engine)
    progress = Progress(stage, steps, start=begin, speak=job.mesh.is_main)
    order = lru_cache(maxsize=2)(lambda epoch: permutation(count, fold(job.recipe.seed, 21), epoch))
    values: dict[str, float] = {}
    for step in range(begin, steps):
        started = time.monotonic()
        places = range(step * training.sequences_per_step, (step + 1) * training.sequences_per_step)
        whole = [order(place // count)[place % count] for place in places]
        mine = list(job.mesh.share(whole))
        result = engine.step(spread(rows(mine, whole), training.microbatch_tokens, job.mesh, job.model.hidden).batches, loss)
        values = {**describe(result.metrics), "grad_norm": result.grad_norm, "lr": result.lr}
        require_finite(values, step)
        if job.mesh.is_main and ((step + 1) % training.log_every == 0 or step + 1 == steps):
            job.run.metrics.append(stage, step + 1, {**values, "time/step_s": time.monotonic() - started})
        progress.update(step + 1, f"loss {values['loss']:.4f}")
        checkpoints.save(engine, step + 1, {})
    return {"steps": steps, "items": count, "checkpoint": checkpoints.final()}


def seeded(job: Job, stage: str) -> random.Random:
    """A stage's own random numbers."""
    return random.Random(f"{job.recipe.seed} {stage}")
