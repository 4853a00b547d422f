"""RLVR of a video world model: clips are imagined with their true actions forced in, decoded, and compared with what happened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.batch import PackedBatch
from ...core.errors import ConfigError
from ...core.progress import Progress
from ...core.rng import fold, permutation
from ...data.trajectory import Invalid, Trajectory
from ...rl.loop import Hooks, reinforce
from ...rl.objective import logprob_score
from ...rl.rollout.episodes import Episode
from ...rl.rollout.sampler import SamplingParams
from ...rl.video.imagine import ClipDecoder, ImaginedClip, Judge
from ..job import Job
from ..settings.video import VideoReinforce
from .common import Checkpoints, build_engine
from .session import open_session
from .video import TokenClips, tokenizer


def run(stage: VideoReinforce, job: Job) -> dict[str, Any]:
    """Train to the last step and say how many gradient tokens it took."""
    if stage.prompts_per_step % job.ranks:
        raise ConfigError(f"stages: {stage.name}.prompts_per_step = {stage.prompts_per_step} must be a multiple of the {job.ranks} ranks")
    clips = TokenClips(job, stage.data, "train")
    layout = clips.layout
    decoder = ClipDecoder(tokenizer(job, clips.stage.tokenizer), layout, stage.bf16)
    judge = Judge(decoder, stage.reward.weights, stage.reward.aggregate, stage.reward.repetition_penalty)
    engine = build_engine(job, stage.optimizer, stage.init)
    frozen = build_engine(job, None, stage.init)
    checkpoints = Checkpoints(job, stage.name, stage.checkpoint_every, stage.steps)
    start, extra = checkpoints.resume(engine)
    progress = Progress(stage.name, stage.steps, start=start, speak=job.speaks)

    def episodes_of(step: int) -> list[Episode]:
        made: list[Episode] = []
        for prompt in job.share(range(step * stage.prompts_per_step, (step + 1) * stage.prompts_per_step)):
            epoch, at = divmod(prompt, len(clips))
            task = clips.task(order(epoch)[at], prompt)
            made += [ImaginedClip(task, k, layout, judge) for k in range(stage.samples_per_prompt)]
        return made

    orders: dict[int, list[int]] = {}

    def order(epoch: int) -> list[int]:
        if epoch not in orders:
            orders.clear()
            orders[epoch] = permutation(len(clips), job.recipe.seed, 31, epoch)
        return orders[epoch]

    def reference(batches: list[PackedBatch]) -> list[torch.Tensor]:
        return [r["logprob"] for r in frozen.score(batches, logprob_score(stage.temperature))]

    def record(step: int, values: dict[str, Any], episodes: Sequence[Episode], trajectories: Sequence[Trajectory]) -> None:
        values = session.observe(step, values, trajectories, limit=None)
        values |= described(job, trajectories)
        values |= {"time/judge_s": judge.seconds, "time/judged_frames_per_s": judge.pictures / max(judge.seconds, 1e-9)}
        judge.seconds, judge.pictures = 0.0, 0
        if not job.speaks:
            return
        job.run.metrics.append(stage.name, step + 1, values)
        progress.update(step + 1, f"reward {values['reward/mean']:.4f}")

    with open_session(job, stage.name, engine, stage.rollouts, start, extra) as session:
        tokens = reinforce(
            engine,
            session.sampler,
            session.issuing(episodes_of),
            stage.algorithm,
            SamplingParams(
                max_new_tokens=layout.sampled,
                temperature=stage.temperature,
                allowed=layout.ids_of("frame") if stage.visual_ids_only else None,
            ),
            Hooks(job.gather, record, session.saving(checkpoints)),
            steps=range(start, stage.steps),
            tokens=extra.get("tokens", 0),
            microbatch_tokens=stage.microbatch_sequences * layout.total,
            drift_gate=stage.drift_gate,
            seed=fold(job.recipe.seed, 2),
            reference=reference,
            kl_every=stage.rollouts_every,
            critic=session.with_critic(stage.algorithm, stage.critic, stage.init, checkpoints, start),
            ahead=session.ahead,
            publish=session.publish,
            rollout_deadline_s=stage.rollouts.deadline_s,
            rest=session.rest,
        )
    return {"steps": stage.steps, "tokens": tokens, "checkpoint": checkpoints.final()}


def described(job: Job, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means of the metrics and of repetition over all valid samples."""
    mine = [t.info for t in trajectories if not isinstance(t.reward, Invalid)]
    everyone = [info for part in job.gather(mine) for info in part]
    if not everyone:
        return {}
    return {f"clip/{name}": sum(float(info[name]) for info in everyone) / len(everyone) for name in everyone[0]}
