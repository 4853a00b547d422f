"""Multi-turn RL of an agent in its worlds: PPO, StarPO-S or any other algorithm, by the embedded sampler or vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.rng import fold
from ...data.trajectory import Trajectory
from ...rl.agents.evaluate import summarise
from ...rl.agents.rollout import Player, Seat, actions_taken, deal, describe_agents, turns_of
from ...rl.rollout.sampler import Sampler, SamplingParams
from ..job import Job
from ..settings.agent import AgentReinforce
from .agent import tasks_of, tokenizer_of, weights_of
from .on_policy import StageTrainer


def run(stage: AgentReinforce, job: Job) -> dict[str, Any]:
    """Train to the last step or until the actions are spent; say how many actions and gradient tokens it took."""
    return AgentTrainer(stage, job).train()


class AgentTrainer(StageTrainer):
    """RL of an agent on seats dealt to tags and seeds."""

    can_refill = False  # the budget counts the actions of a step's own episodes

    def __init__(self, stage: AgentReinforce, job: Job) -> None:
        self.agent = stage
        self.tags, self.validation_tags = weights_of(job, stage.tags), weights_of(job, stage.validation.tags if stage.validation else {})
        self.worlds, tokenizer = tasks_of(job, [*self.tags, *self.validation_tags]), tokenizer_of(job)
        self.player = Player(tokenizer, stage.agent)
        self.before = sum(job.outcome(name)["actions"] for name in stage.counting)
        params = SamplingParams(stage.max_new_tokens, stage.temperature, stop_ids=tokenizer.stop_ids)
        super().__init__(stage, job, params, stage.microbatch_tokens, stage.lora)

    def deal(self, number: int) -> list[Seat]:
        stage = self.agent
        return list(
            self.mesh.share(deal(self.worlds, self.tags, stage.prompts_per_step, stage.samples_per_prompt, stage.first_seed, number))
        )

    def play(self, sampler: Sampler, episodes: list[Seat], seed: int) -> list[Trajectory]:
        return self.player.play(sampler, episodes, self.params, seed)

    def turns(self, episode: Seat) -> list[dict[str, Any]]:
        return turns_of(episode)

    def progress(self, values: dict[str, Any]) -> str:
        return f"reward {values['reward/mean']:.3f}  success {values.get('agent/success', float('nan')):.3f}"

    def measure(self, step: int, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        self.counts["actions"] += sum(self.mesh.gather(actions_taken(trajectories)))
        return {**describe_agents(trajectories, self.mesh.gather), **self.counts, **self.on_held_out_seeds(step + 1)}

    def on_held_out_seeds(self, step: int) -> dict[str, float]:
        """Validation by tags and seeds of its own, where the stage asks for it."""
        asked = self.agent.validation
        if asked is None or not (step % asked.every == 0 or step == self.stage.steps):
            return {}
        seats = list(self.mesh.share(deal(self.worlds, self.validation_tags, asked.groups, asked.samples_per_group, asked.first_seed)))
        played = self.mesh.from_leader(lambda: self.play(self.sampler, seats, fold(self.job.recipe.seed, 5, step)))
        scores = summarise([t for part in self.mesh.gather(played) for t in part])
        k = asked.samples_per_group
        return {"validation/pass@1": scores.passes(1).value, f"validation/pass@{k}": scores.passes(k).value}

    def counted(self) -> tuple[str, ...]:
        return ("actions",)

    def spent(self) -> bool:
        return self.agent.actions is not None and self.counts["actions"] + self.before >= self.agent.actions
