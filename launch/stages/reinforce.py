"""RLVR on imagined rollouts, in the rooms the world model learnt from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.files import read_json
from ...core.rng import fold
from ...rl.imagination import ImaginationEpisode, make_task
from ...rl.rollout.sampler import SamplingParams
from ..job import Job
from ..settings.grid import Reinforce
from .common import split_cut
from .grid import dynamics_of, tokenizer_of
from .on_policy import StageTrainer
from .selfplay import ROOMS


def run(stage: Reinforce, job: Job) -> dict[str, Any]:
    """Train to the last step and say how many gradient tokens it took."""
    return GridTrainer(stage, job).train()


class GridTrainer(StageTrainer):
    """RL on states that the model imagines, one after the other, for actions that are given."""

    free_text = False

    def __init__(self, stage: Reinforce, job: Job) -> None:
        rooms = read_json(job.stage_folder(stage.tasks.source) / ROOMS)["train"]
        self.rooms, self.cut = map(list, split_cut(rooms, stage.rollouts.validation, stage.name))
        self.imagination, self.dynamics, self.tokenizer = stage.tasks, dynamics_of(job), tokenizer_of(job)
        state_tokens = len(self.tokenizer.encode(rooms[0]))
        params = SamplingParams(max_new_tokens=state_tokens, temperature=stage.temperature)
        super().__init__(stage, job, params, stage.microbatch_sequences * 2 * state_tokens)

    def imagined(self, places: Sequence[int], rooms: list[str], samples: int, seed: int) -> list[ImaginationEpisode]:
        """The samples of these places' tasks in rooms."""
        steps, walk = self.imagination.steps, self.imagination.walk
        tasks = [make_task(self.dynamics, rooms, i, steps, walk, seed) for i in places]
        return [ImaginationEpisode(task, k, self.tokenizer) for task in tasks for k in range(samples)]

    def deal(self, number: int) -> list[ImaginationEpisode]:
        return self.imagined(self.places(number), self.rooms, self.stage.samples_per_prompt, fold(self.job.recipe.seed, 1))

    def held_back(self) -> list[ImaginationEpisode]:
        sizes = self.stage.rollouts.validation
        return self.imagined(self.mesh.share(range(sizes.prompts)), self.cut, sizes.samples, fold(self.job.recipe.seed, 3))

    def progress(self, values: dict[str, Any]) -> str:
        return f"reward {values['reward/mean']:.3f}  all exact {values['reward/perfect']:.3f}"

    def turns(self, episode: ImaginationEpisode) -> list[dict[str, Any]]:
        return episode.picture(self.dynamics)
