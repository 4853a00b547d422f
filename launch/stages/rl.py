"""RL on an environment's training tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.rng import permutation
from ...data.trajectory import Trajectory
from ...rl.rollout.sampler import Sampler
from ...rl.tasks import Tasks
from ..job import Job
from ..settings.verbs import Reinforce
from .common import split_cut
from .on_policy import StageTrainer
from .verbs import environment, require_judged, require_tasks

CUT = 0x637574  # the key of the draw of tasks to validate on


def check(stage: Reinforce, job: Job) -> None:
    """Before the run starts: the batch divides, the environment opens, has training tasks, and can judge them."""
    job.mesh.require_even(stage.prompts_per_step, f"stages: {stage.name}.prompts_per_step")
    if job.mesh.is_main:
        with environment(stage, job) as tasks:
            require_judged(tasks)
            require_tasks(tasks, "train", stage.name)


def run(stage: Reinforce, job: Job) -> dict[str, Any]:
    """Train to the last step and say how many gradient tokens it took."""
    with environment(stage, job) as tasks:
        return TaskTrainer(stage, job, tasks).train()


class TaskTrainer(StageTrainer):
    """RL on the tasks of an environment."""

    def __init__(self, stage: Reinforce, job: Job, tasks: Tasks) -> None:
        self.tasks, self.train_tasks, self.free_text = tasks, tasks.of("train"), tasks.free_text
        places = permutation(len(self.train_tasks), job.recipe.seed, CUT)
        self.cut = split_cut(places, stage.rollouts.validation, stage.name)[1]
        self.order = tasks.order(job.recipe.seed, without=self.cut)
        params = tasks.params(stage.max_new_tokens, stage.temperature)
        super().__init__(stage, job, params, stage.microbatch_tokens, stage.lora)

    def deal(self, number: int) -> list[Any]:
        asked = [(place, self.train_tasks[self.order(place)]) for place in self.places(number)]
        return [self.tasks.episode(task, place, k) for place, task in asked for k in range(self.stage.samples_per_prompt)]

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
        return self.tasks.measures(trajectories, self.mesh.gather)
