"""Multi-turn RL of an agent in its worlds: PPO, StarPO-S or any other algorithm, by the embedded sampler or vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.batch import PackedBatch
from ...core.errors import ConfigError
from ...core.progress import Progress
from ...core.rng import fold
from ...data.trajectory import Trajectory
from ...rl.agent_eval import summarise
from ...rl.agent_rollout import Player, actions_taken, deal, describe_agents, picture
from ...rl.loop import Hooks, reinforce
from ...rl.objective import logprob_score
from ...rl.rollout.sampler import Sampler, SamplingParams
from ..job import Job
from ..settings.agent import AgentReinforce
from .agent import tasks_of, tokenizer_of, weights_of
from .common import Checkpoints, build_engine
from .reinforce import SHOWN
from .session import open_session


class BudgetSpent(Exception):
    """The arm has taken all its actions, and the stage has saved."""


def run(stage: AgentReinforce, job: Job) -> dict[str, Any]:
    """Train to the last step or until the actions are spent; say how many actions and gradient tokens it took."""
    if stage.prompts_per_step % job.ranks:
        raise ConfigError(f"stages: {stage.name}.prompts_per_step = {stage.prompts_per_step} must be a multiple of the {job.ranks} ranks")
    tags, validation_tags = weights_of(job, stage.tags), weights_of(job, stage.validation.tags if stage.validation else {})
    tasks, tokenizer = tasks_of(job, [*tags, *validation_tags]), tokenizer_of(job)
    player = Player(tokenizer, stage.agent)
    params = SamplingParams(stage.max_new_tokens, stage.temperature, stop_ids=(tokenizer.eos_id,))
    engine = build_engine(job, stage.optimizer, stage.init, stage.lora)
    frozen = build_engine(job, None, stage.init)
    checkpoints = Checkpoints(job, stage.name, stage.checkpoint_every, stage.steps)
    start, extra = checkpoints.resume(engine)
    taken = {"here": extra.get("actions", 0), "before": sum(job.outcome(name)["actions"] for name in stage.counting)}
    if start and stage.actions is not None and taken["here"] + taken["before"] >= stage.actions:
        checkpoints.last = start  # killed between the last save and the end
    progress = Progress(stage.name, stage.steps, start=start, speak=job.speaks)

    def seats_of(step: int) -> list[Any]:
        dealt = deal(tasks, tags, stage.prompts_per_step, stage.samples_per_prompt, stage.first_seed, step)
        return list(job.share(dealt))

    def play(sampler: Sampler, seats: list[Any], params: SamplingParams, seed: int) -> list[Trajectory]:
        return player.play(sampler, seats, params, seed)

    def reference(batches: list[PackedBatch]) -> list[torch.Tensor]:
        return [r["logprob"] for r in frozen.score(batches, logprob_score(stage.temperature))]

    def validate(step: int) -> dict[str, float]:
        asked = stage.validation
        if asked is None or not (step % asked.every == 0 or step == stage.steps):
            return {}
        seats = list(job.share(deal(tasks, validation_tags, asked.groups, asked.samples_per_group, asked.first_seed)))
        played = player.play(session.sampler, seats, params, fold(job.recipe.seed, 5, step))
        scores = summarise([t for part in job.gather(played) for t in part])
        k = asked.samples_per_group
        return {"validation/pass@1": scores.passes(1).value, f"validation/pass@{k}": scores.passes(k).value}

    def record(step: int, values: dict[str, Any], seats: Sequence[Any], trajectories: Sequence[Trajectory]) -> None:
        taken["here"] += sum(job.gather(actions_taken(trajectories)))
        values = session.observe(step, values, trajectories, limit=stage.max_new_tokens)
        values = {**values, **describe_agents(trajectories, job.gather), "actions": taken["here"], **validate(step + 1)}
        if stage.actions is not None and taken["here"] + taken["before"] >= stage.actions:
            checkpoints.last = step + 1
        if not job.speaks:
            return
        job.run.metrics.append(stage.name, step + 1, values)
        if step % stage.rollouts_every == 0 or step + 1 == checkpoints.last:
            job.run.write_rollouts(stage.name, step + 1, picture(step + 1, seats, trajectories, SHOWN))
        progress.update(step + 1, f"reward {values['reward/mean']:.3f}  success {values.get('agent/success', float('nan')):.3f}")

    with open_session(job, stage.name, engine, stage.rollouts, start, extra) as session:
        write = session.saving(checkpoints)
        done = {"tokens": extra.get("tokens", 0), "steps": start}

        def save(step: int, state: dict[str, Any]) -> None:
            write(step, {**state, "actions": taken["here"]})
            done.update(tokens=state["tokens"], steps=step)
            if step == checkpoints.last < stage.steps:
                raise BudgetSpent

        try:
            reinforce(
                engine,
                session.sampler,
                session.issuing(seats_of),
                stage.algorithm,
                params,
                Hooks(job.gather, record, save),
                steps=range(start, checkpoints.last),
                tokens=extra.get("tokens", 0),
                microbatch_tokens=stage.microbatch_tokens,
                drift_gate=stage.drift_gate,
                seed=fold(job.recipe.seed, 2),
                reference=reference,
                kl_every=stage.rollouts_every,
                critic=session.with_critic(stage.algorithm, stage.critic, stage.init, checkpoints, start),
                ahead=session.ahead,
                publish=session.publish,
                rollout_deadline_s=stage.rollouts.deadline_s,
                rest=session.rest,
                play=play,
            )
        except BudgetSpent:
            pass
    return {**done, "actions": taken["here"], "checkpoint": checkpoints.final()}
