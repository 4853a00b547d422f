"""RLVR on imagined rollouts: GRPO with the embedded sampler, on the rooms the world model learnt from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.batch import PackedBatch
from ...core.engine import Engine
from ...core.errors import ConfigError
from ...core.files import read_json
from ...core.progress import Progress
from ...core.rng import fold
from ...data.trajectory import Invalid, Trajectory
from ...rl.algorithms.config import DAPO
from ...rl.imagination import ImaginationEpisode, make_task
from ...rl.loop import Hooks, reinforce
from ...rl.objective import logprob_score
from ...rl.rollout.embedded import EmbeddedSampler
from ...rl.rollout.episodes import Episode
from ...rl.rollout.sampler import SamplingParams
from ..job import Job
from ..settings.grid import Reinforce
from .common import Checkpoints, build_engine, split_cut
from .selfplay import ROOMS
from .session import open_session

SHOWN = 12  # trajectories of a step kept for the report


def embedded_sampler(engine: Engine, job: Job) -> EmbeddedSampler:
    """A sampler on the engine's own weights."""
    if engine.parallel.model_size > 1:
        raise ConfigError("parallel: the embedded sampler needs tensor, pipeline and context = 1; every rank holds the whole model")
    return EmbeddedSampler(lambda: {p.name: p.param.detach() for p in engine.local_parameters()}, job.model, version=lambda: engine.steps)


def run(stage: Reinforce, job: Job) -> dict[str, Any]:
    """Train to the last step and say how many gradient tokens it took."""
    if stage.prompts_per_step % job.ranks:
        raise ConfigError(f"stages: {stage.name}.prompts_per_step = {stage.prompts_per_step} must be a multiple of the {job.ranks} ranks")
    rooms, cut = split_cut(read_json(job.stage_folder(stage.tasks.source) / ROOMS)["train"], stage.rollouts.validation, stage.name)
    engine = build_engine(job, stage.optimizer, stage.init)
    frozen = build_engine(job, None, stage.init)
    checkpoints = Checkpoints(job, stage.name, stage.checkpoint_every, stage.steps)
    start, extra = checkpoints.resume(engine)
    progress = Progress(stage.name, stage.steps, start=start, speak=job.speaks)
    state_tokens = len(job.tokenizer.encode(rooms[0]))

    def episodes_of(number: int) -> list[Episode]:
        prompts = job.share(range(number * stage.prompts_per_step, (number + 1) * stage.prompts_per_step))
        seed = fold(job.recipe.seed, 1)
        tasks = [make_task(job.dynamics, rooms, i, stage.tasks.steps, stage.tasks.walk, seed) for i in prompts]
        return [ImaginationEpisode(task, k, job.tokenizer) for task in tasks for k in range(stage.samples_per_prompt)]

    def held_back() -> list[Episode]:
        seed, sizes = fold(job.recipe.seed, 3), stage.rollouts.validation
        places = range(job.rank, sizes.prompts, job.ranks)
        tasks = [make_task(job.dynamics, cut, i, stage.tasks.steps, stage.tasks.walk, seed) for i in places]
        return [ImaginationEpisode(task, k, job.tokenizer) for task in tasks for k in range(sizes.samples)]

    def refill(step: int, number: int) -> list[Episode]:
        return episodes_of(stage.steps + step * getattr(stage.algorithm, "refills", 0) + number)  # prompts that no step has

    def reference(batches: list[PackedBatch]) -> list[torch.Tensor]:
        return [r["logprob"] for r in frozen.score(batches, logprob_score(stage.temperature))]

    def record(step: int, values: dict[str, Any], episodes: Sequence[Episode], trajectories: Sequence[Trajectory]) -> None:
        values = session.observe(step, values, trajectories, limit=None)
        if not job.speaks:
            return
        job.run.metrics.append(stage.name, step + 1, values)
        if step % stage.rollouts_every == 0 or step + 1 == stage.steps:
            job.run.write_rollouts(stage.name, step + 1, picture(job, step + 1, episodes, trajectories))
        progress.update(step + 1, f"reward {values['reward/mean']:.3f}  all exact {values['reward/perfect']:.3f}")

    params = SamplingParams(max_new_tokens=state_tokens, temperature=stage.temperature)
    with open_session(job, stage.name, engine, stage.rollouts, start, extra) as session:
        tokens = reinforce(
            engine,
            session.sampler,
            session.issuing(episodes_of),
            stage.algorithm,
            params,
            Hooks(job.gather, record, session.saving(checkpoints)),
            steps=range(start, stage.steps),
            tokens=extra.get("tokens", 0),
            microbatch_tokens=stage.microbatch_sequences * 2 * state_tokens,
            drift_gate=stage.drift_gate,
            seed=fold(job.recipe.seed, 2),
            reference=reference,
            kl_every=stage.rollouts_every,
            critic=session.with_critic(stage.algorithm, stage.critic, stage.init, checkpoints, start),
            ahead=session.ahead,
            publish=session.publish,
            rollout_deadline_s=stage.rollouts.deadline_s,
            validate=session.validation(held_back, params, fold(job.recipe.seed, 2)),
            rest=session.rest,
            refill=refill if isinstance(stage.algorithm, DAPO) else None,
        )
    return {"steps": stage.steps, "tokens": tokens, "checkpoint": checkpoints.final()}


def picture(job: Job, step: int, episodes: Sequence[Episode], trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """A few trajectories as the report shows them."""
    return [
        {
            "step": step,
            "prompt_id": t.prompt_id,
            "sample": t.sample_index,
            "reward": None if isinstance(t.reward, Invalid) else t.reward,
            "invalid": t.reward.reason if isinstance(t.reward, Invalid) else None,
            "turns": e.picture(job.dynamics),
        }
        for e, t in list(zip(episodes, trajectories, strict=True))[:SHOWN]
        if isinstance(e, ImaginationEpisode)
    ]
