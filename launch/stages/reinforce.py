"""RLVR on imagined rollouts, in the rooms the world model learnt from."""

from __future__ import annotations

from typing import Any

from ...core.files import read_json
from ...core.rng import fold
from ...rl.algorithms.config import DAPO
from ...rl.imagination import ImaginationEpisode, make_task
from ...rl.rollout.sampler import SamplingParams
from ..job import Job
from ..settings.grid import Reinforce
from .common import split_cut
from .on_policy import Drill, practise
from .selfplay import ROOMS


def run(stage: Reinforce, job: Job) -> dict[str, Any]:
    """Train to the last step and say how many gradient tokens it took."""
    rooms, cut = split_cut(read_json(job.stage_folder(stage.tasks.source) / ROOMS)["train"], stage.rollouts.validation, stage.name)
    state_tokens = len(job.tokenizer.encode(rooms[0]))

    def episodes_of(number: int) -> list[ImaginationEpisode]:
        prompts = job.mesh.share(range(number * stage.prompts_per_step, (number + 1) * stage.prompts_per_step))
        seed = fold(job.recipe.seed, 1)
        tasks = [make_task(job.dynamics, rooms, i, stage.tasks.steps, stage.tasks.walk, seed) for i in prompts]
        return [ImaginationEpisode(task, k, job.tokenizer) for task in tasks for k in range(stage.samples_per_prompt)]

    def held_back() -> list[ImaginationEpisode]:
        seed, sizes = fold(job.recipe.seed, 3), stage.rollouts.validation
        places = job.mesh.share(range(sizes.prompts))
        tasks = [make_task(job.dynamics, cut, i, stage.tasks.steps, stage.tasks.walk, seed) for i in places]
        return [ImaginationEpisode(task, k, job.tokenizer) for task in tasks for k in range(sizes.samples)]

    def refill(step: int, number: int) -> list[ImaginationEpisode]:
        return episodes_of(stage.steps + step * getattr(stage.algorithm, "refills", 0) + number)  # prompts that no step has

    drill = Drill(
        params=SamplingParams(max_new_tokens=state_tokens, temperature=stage.temperature),
        microbatch_tokens=stage.microbatch_sequences * 2 * state_tokens,
        episodes_of=episodes_of,
        progress=lambda values: f"reward {values['reward/mean']:.3f}  all exact {values['reward/perfect']:.3f}",
        turns=lambda episode: episode.picture(job.dynamics),
        held_back=held_back,
        free_text=False,
        refill=refill if isinstance(stage.algorithm, DAPO) else None,
    )
    return practise(stage, job, drill)
