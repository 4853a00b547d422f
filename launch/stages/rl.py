"""RL on an environment's training tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from ...core.errors import ConfigError
from ...core.rng import fold
from ...data.trajectory import Trajectory
from ...rl.preparation import require_valid, wants_refills
from ...rl.rollout.anew import Played, take_or_retake
from ...rl.rollout.config import Embedded
from ...rl.rollout.open import as_stream, open_sampler
from ...rl.rollout.sampler import Sampler
from ...rl.tasks import Tasks
from ..job import Job, log
from ..settings.verbs import Reinforce
from .common import build_engine, split_cut
from .on_policy import StageTrainer
from .verbs import environment, require_judged, require_sampler, require_tasks


def check(stage: Reinforce, job: Job) -> None:
    """Before the run starts: the batch divides, the environment opens, has training tasks, and can judge them."""
    job.mesh.require_even(stage.prompts_per_step, f"stages: {stage.name}.prompts_per_step")
    require_sampler(stage, job)
    try:
        wants_refills(stage.algorithm, stage.actions is None, stage.rollouts.ahead)
    except ConfigError as error:
        raise ConfigError(f"stages: {stage.name}.rollouts.{error}") from error
    if job.mesh.is_main:
        with environment(stage, job) as tasks:
            require_judged(tasks, "train")
            require_tasks(tasks, "train", stage.name)
            tasks.require_room(stage.max_new_tokens, "train" if stage.validation is None else None)
            if stage.validation is None:
                return
            require_tasks(tasks, "test", stage.name)
            if tasks.imagined_by is None and stage.validation.on_gap == "stop":
                raise ConfigError(
                    f"stages: {stage.name}.validation.on_gap: only RL in an imagined world has a gap to stop at; give "
                    "its env imagined_by, or leave on_gap out"
                )


def run(stage: Reinforce, job: Job) -> dict[str, Any]:
    """Train to the last step and say how many gradient tokens it took."""
    with environment(stage, job) as tasks:
        for split in ("train", "test") if stage.validation is not None else ("train",):
            require_tasks(tasks, split, stage.name)  # what an earlier stage was to make is there now
        job.mesh.from_main(lambda: tasks.reset("train"))
        with _imagination(stage, job, tasks):
            outcome = {**tasks.facts(), **TaskTrainer(stage, job, tasks).train()}
        if job.mesh.is_main:
            rows = [row for row in job.run.metrics.rows() if row["stage"] == stage.name]
            for name, table in tasks.step_tables(stage.name, rows).items():
                job.run.write_result(f"{stage.name}-{name}", table)
    return outcome


@contextmanager
def _imagination(stage: Reinforce, job: Job, tasks: Tasks) -> Iterator[None]:
    """The world model that plays the world of the training tasks, where the environment names one."""
    if tasks.imagined_by is None:
        yield
        return
    engine = build_engine(job, None, tasks.imagined_by)
    folder = job.stage_folder(stage.name) / "imagination"
    opened = open_sampler(Embedded(), engine, job.model, folder, mesh=job.mesh)
    if stage.rollouts.streamed:
        opened = as_stream(opened)
    try:
        if opened.publish is not None:
            opened.publish(engine.steps)
        tasks.imagination = opened.sampler
        yield
    finally:
        opened.close()


def actions_of(job: Job, stage: Reinforce, name: str) -> int:
    """The actions that an earlier stage took."""
    outcome = job.outcome(name)
    if "actions" not in outcome:
        raise ConfigError(f"stages: {stage.name}.counting: stage '{name}' counts no actions; name collect stages")
    return outcome["actions"]


class TaskTrainer(StageTrainer):
    """RL on the tasks of an environment."""

    stage: Reinforce

    def __init__(self, stage: Reinforce, job: Job, tasks: Tasks) -> None:
        self.tasks, self.train_tasks = tasks, tasks.of("train")
        self.free_text, self.shows_turns = tasks.free_text, tasks.shows_turns
        self.cut = split_cut(tasks.numbers(job.recipe.seed), stage.rollouts.validation, stage.name)[1]
        self.order = tasks.order(job.recipe.seed, without=self.cut)
        self.can_refill = stage.actions is None  # a budget counts the actions of a step's own episodes
        self.before = sum(actions_of(job, stage, name) for name in stage.counting)
        params = tasks.params(stage.max_new_tokens, stage.temperature)
        super().__init__(stage, job, params, stage.microbatch_tokens, stage.lora)

    def deal(self, number: int) -> list[Any]:
        asked = [(place, self.train_tasks[self.order(place)]) for place in self.places(number)]
        return [
            self.tasks.episode(task, place, k) for place, task in asked for k in range(self.stage.samples_per_prompt)
        ]

    def held_back(self) -> list[Any]:
        samples = range(self.stage.rollouts.validation.samples)
        return [self.tasks.episode(self.train_tasks[i], i, k) for i in self.mesh.share(self.cut) for k in samples]

    def play(self, sampler: Sampler, episodes: list[Any], seed: int) -> list[Trajectory]:
        return self.tasks.play(sampler, episodes, self.params, seed)

    def turns(self, episode: Any) -> list[dict[str, Any]]:
        return self.tasks.shown(episode)

    def progress(self, values: dict[str, Any]) -> str:
        return self.tasks.progress(values)

    def measure(self, step: int, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        if self.counts:
            parts = self.mesh.gather(self.tasks.tally([*trajectories, *self.refilled]))
            for name in self.counts:
                self.counts[name] += sum(part.get(name, 0) for part in parts)
        held_out = self.on_held_out_tasks(step + 1)
        return {**self.tasks.measures(trajectories, self.mesh.gather), **self.counts, **held_out}

    def on_held_out_tasks(self, step: int) -> dict[str, float]:
        """Scores on tasks of the test split, where the stage asks for them."""
        asked = self.stage.validation
        if asked is None or not (step % asked.every == 0 or step == self.stage.steps):
            return {}
        chosen = self.tasks.some(asked.prompts)
        true = self._played(chosen, asked.samples, step)
        scores = self.tasks.scores(true, asked.samples)
        values = {f"validation/{name}": value for name, value in scores.items()}
        if self.tasks.imagined_by is None:
            return values
        imagined = self._played([self.tasks.imagined(task) for task in chosen], asked.samples, step)
        name, score = next(iter(self.tasks.scores(imagined, asked.samples).items()))
        gap = score - scores[name]
        values |= {f"validation/imagined/{name}": score, "validation/gap": gap}
        if gap <= asked.max_gap:
            return values
        if self.mesh.is_main:
            log.warning(
                "step %d: alarm exploitation: success in imagination is %.3f above that in the true world, "
                "validation.max_gap is %.3g",
                *(step, gap, asked.max_gap),
            )
        self.counts["exploited"] += asked.on_gap == "stop"
        return values | {"alarm/exploitation": 1.0}

    def _played(self, tasks: Sequence[Any], samples: int, step: int) -> list[Trajectory]:
        """Some tasks, played by all ranks together. As in training, servers that lost their weights get them again, and
        too many Invalid samples stop the run: what is left of them says little, of a gap least of all.
        """
        asked = [(i, task, k) for i, task in enumerate(tasks) for k in range(samples)]
        seed, where = fold(self.job.recipe.seed, 5, step), f"validation after {step} steps"

        def take() -> Played:
            episodes = [self.tasks.episode(task, i, k) for i, task, k in self.mesh.share(asked)]
            return episodes, self.play(self.sampler, episodes, seed)

        publish = partial(self.publish, self.engine.steps)
        _, played = take_or_retake(self.mesh, self.sampler, take, publish, where)
        require_valid(played, self.stage.rollouts.max_invalid_share, self.mesh.gather, where)
        if getattr(self.stage.rollouts.sampler, "colocated", False):
            # a checkpoint may follow: the trainer gets its memory back, and the sampler that slept its weights
            self.rest()
            publish()
        return [t for part in self.mesh.gather(played) for t in part]

    def counted(self) -> tuple[str, ...]:
        counted = self.tasks.counted or (("actions",) if self.stage.actions is not None else ())
        return (*counted, "exploited") if self.tasks.imagined_by is not None else counted

    def ended_by(self) -> str | None:
        """The budget of actions where it is used up, or the limit of what may be imagined where it was passed."""
        budget = self.stage.actions
        if budget is not None and self.counts["actions"] + self.before >= budget:
            return f"actions = {budget} are used up"
        if self.counts.get("exploited", 0) and self.stage.validation is not None:
            return f"validation.on_gap is stop, and the gap was above max_gap = {self.stage.validation.max_gap:g}"
        return None
