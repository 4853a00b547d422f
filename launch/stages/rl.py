"""RL on an environment's training tasks."""

from __future__ import annotations

from typing import Any

from ...core.errors import ConfigError
from ...core.rng import permutation
from ...rl.algorithms.config import DAPO
from ...rl.own.config import DataEnvironment
from ..job import Job
from ..settings.verbs import Reinforce
from .common import split_cut
from .on_policy import Drill, practise
from .verbs import environment

CUT = 0x637574  # the key of the draw of tasks to validate on


def check(stage: Reinforce, job: Job) -> None:
    """Before the run starts: the batch divides, the environment opens, has training tasks, and can judge them."""
    job.mesh.require_even(stage.prompts_per_step, f"stages: {stage.name}.prompts_per_step")
    env = stage.env or job.recipe.env
    if isinstance(env, DataEnvironment) and env.reward is None:
        raise ConfigError(f"env.reward: stage '{stage.name}' trains by a reward; name one: file.py:function, exact, contains or number")
    if job.mesh.is_main:
        with environment(stage, job) as tasks:
            if not len(tasks.of("train")):
                raise ConfigError(f"env: has no training task for stage '{stage.name}'")


def run(stage: Reinforce, job: Job) -> dict[str, Any]:
    """Train to the last step and say how many gradient tokens it took."""
    with environment(stage, job) as tasks:
        train, validation = tasks.of("train"), stage.rollouts.validation
        cut = split_cut(permutation(len(train), job.recipe.seed, CUT), validation, stage.name)[1]
        order = tasks.order(job.recipe.seed, without=cut)

        def episodes_of(step: int) -> list[Any]:
            places = job.mesh.share(range(step * stage.prompts_per_step, (step + 1) * stage.prompts_per_step))
            asked = [(place, train[order(place)]) for place in places]
            return [tasks.episode(task, place, k) for place, task in asked for k in range(stage.samples_per_prompt)]

        def held_back() -> list[Any]:
            return [tasks.episode(train[i], i, k) for i in job.mesh.share(cut) for k in range(validation.samples)]

        def refill(step: int, number: int) -> list[Any]:
            return episodes_of(stage.steps + step * getattr(stage.algorithm, "refills", 0) + number)  # tasks that no step has

        drill = Drill(
            params=tasks.params(stage.max_new_tokens, stage.temperature),
            microbatch_tokens=stage.microbatch_tokens,
            episodes_of=episodes_of,
            progress=tasks.progress,
            turns=tasks.shown,
            measure=lambda sampler, step, trajectories: tasks.measures(trajectories, job.mesh.gather),
            held_back=held_back,
            free_text=tasks.free_text,
            play=tasks.play,
            refill=refill if isinstance(stage.algorithm, DAPO) else None,
        )
        return practise(stage, job, drill, stage.lora)
