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
from .on_policy import Drill, practise


def run(stage: AgentReinforce, job: Job) -> dict[str, Any]:
    """Train to the last step or until the actions are spent; say how many actions and gradient tokens it took."""
    tags, validation_tags = weights_of(job, stage.tags), weights_of(job, stage.validation.tags if stage.validation else {})
    tasks, tokenizer = tasks_of(job, [*tags, *validation_tags]), tokenizer_of(job)
    player = Player(tokenizer, stage.agent)
    params = SamplingParams(stage.max_new_tokens, stage.temperature, stop_ids=(tokenizer.eos_id,))
    counts, before = {"actions": 0}, sum(job.outcome(name)["actions"] for name in stage.counting)

    def seats_of(step: int) -> list[Seat]:
        return list(job.mesh.share(deal(tasks, tags, stage.prompts_per_step, stage.samples_per_prompt, stage.first_seed, step)))

    def validate(sampler: Sampler, step: int) -> dict[str, float]:
        asked = stage.validation
        if asked is None or not (step % asked.every == 0 or step == stage.steps):
            return {}
        seats = list(job.mesh.share(deal(tasks, validation_tags, asked.groups, asked.samples_per_group, asked.first_seed)))
        played = job.mesh.from_leader(lambda: player.play(sampler, seats, params, fold(job.recipe.seed, 5, step)))
        scores = summarise([t for part in job.mesh.gather(played) for t in part])
        k = asked.samples_per_group
        return {"validation/pass@1": scores.passes(1).value, f"validation/pass@{k}": scores.passes(k).value}

    def measure(sampler: Sampler, step: int, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        counts["actions"] += sum(job.mesh.gather(actions_taken(trajectories)))
        return {**describe_agents(trajectories, job.mesh.gather), **counts, **validate(sampler, step + 1)}

    drill = Drill(
        params=params,
        microbatch_tokens=stage.microbatch_tokens,
        episodes_of=seats_of,
        progress=lambda values: f"reward {values['reward/mean']:.3f}  success {values.get('agent/success', float('nan')):.3f}",
        turns=turns_of,
        measure=measure,
        play=player.play,
        counts=counts,
        spent=lambda: stage.actions is not None and counts["actions"] + before >= stage.actions,
    )
    return practise(stage, job, drill, stage.lora)
