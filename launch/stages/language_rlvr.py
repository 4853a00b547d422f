"""RLVR of a language world model: sampled answers, a rule as judge, GRPO with the embedded sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.batch import PackedBatch
from ...core.errors import ConfigError
from ...core.progress import Progress
from ...core.rng import fold
from ...data.trajectory import Invalid, Trajectory
from ...rl.language import AnswerEpisode, Question
from ...rl.loop import Hooks, reinforce
from ...rl.objective import logprob_score
from ...rl.rollout.episodes import Episode
from ...rl.rollout.sampler import SamplingParams
from ..job import Job
from ..settings.language import LanguageReinforce
from .common import Checkpoints, build_engine
from .language import Questions
from .reinforce import SHOWN
from .session import open_session


def run(stage: LanguageReinforce, job: Job) -> dict[str, Any]:
    """Train to the last step and say how many gradient tokens it took."""
    if stage.prompts_per_step % job.ranks:
        raise ConfigError(f"stages: {stage.name}.prompts_per_step = {stage.prompts_per_step} must be a multiple of the {job.ranks} ranks")
    questions = Questions(job, stage.data)
    cut = questions.cut(stage.rollouts.validation, stage.name)
    stream = questions.stream(stage.non_gold_ratio, without=cut)
    engine = build_engine(job, stage.optimizer, stage.init, stage.lora)
    frozen = build_engine(job, None, stage.init)
    checkpoints = Checkpoints(job, stage.name, stage.checkpoint_every, stage.steps)
    start, extra = checkpoints.resume(engine)
    progress = Progress(stage.name, stage.steps, start=start, speak=job.speaks)

    def episodes_of(step: int) -> list[Episode]:
        places = job.share(range(step * stage.prompts_per_step, (step + 1) * stage.prompts_per_step))
        asked = [(place, questions.at(stream[place])) for place in places]
        return [answer(q, place, k) for place, q in asked for k in range(stage.samples_per_prompt)]

    def answer(question: Question, place: int, sample: int) -> Episode:
        made = {"kind": stage.reward, "mode": stage.mode, "multiple": questions.multiple}
        return AnswerEpisode(question, place, sample, questions.tokenizer, **made)

    def held_back() -> list[Episode]:
        return [answer(questions.at(i), i, k) for i in cut[job.rank :: job.ranks] for k in range(stage.rollouts.validation.samples)]

    def reference(batches: list[PackedBatch]) -> list[torch.Tensor]:
        return [r["logprob"] for r in frozen.score(batches, logprob_score(stage.temperature))]

    def record(step: int, values: dict[str, Any], episodes: Sequence[Episode], trajectories: Sequence[Trajectory]) -> None:
        values = session.observe(step, values, trajectories, limit=stage.max_new_tokens)
        unread = sum(job.gather(sum(bool(t.info.get("reason")) for t in trajectories)))
        if not job.speaks:
            return
        job.run.metrics.append(stage.name, step + 1, {**values, "reward/unreadable": unread})
        if step % stage.rollouts_every == 0 or step + 1 == stage.steps:
            job.run.write_rollouts(stage.name, step + 1, picture(step + 1, episodes, trajectories))
        progress.update(step + 1, f"reward {values['reward/mean']:.3f}")

    params = SamplingParams(max_new_tokens=stage.max_new_tokens, temperature=stage.temperature, stop_ids=(questions.tokenizer.eos_id,))
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
            microbatch_tokens=stage.microbatch_tokens,
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
        )
    return {"steps": stage.steps, "tokens": tokens, "checkpoint": checkpoints.final()}


def picture(step: int, episodes: Sequence[Episode], trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """A few answers as the report shows them."""
    return [
        {
            "step": step,
            "prompt_id": t.prompt_id,
            "sample": t.sample_index,
            "reward": None if isinstance(t.reward, Invalid) else t.reward,
            "invalid": t.reward.reason if isinstance(t.reward, Invalid) else None,
            "turns": [
                {
                    "prompt": e.question.prompt,
                    "action": e.question.row.get("tick_state", {}).get("lastAction", ""),
                    "prediction": e.response or "",
                    "truth": e.question.answer,
                    "exact": e.response == e.question.answer,
                }
            ],
        }
        for e, t in list(zip(episodes, trajectories, strict=True))[:SHOWN]
        if isinstance(e, AnswerEpisode)
    ]
