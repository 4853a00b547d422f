"""What the RL stages share: two engines, resuming, the session around the loop, records, and a stop when a budget is spent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.batch import PackedBatch
from ...core.progress import Progress
from ...core.rng import fold
from ...data.trajectory import Invalid, Trajectory
from ...rl.algorithms import needs
from ...rl.loop import Hooks, Updates, reinforce
from ...rl.objective import logprob_score
from ...rl.rollout.episodes import rollout
from ...rl.rollout.sampler import Sampler, SamplingParams
from ..job import Job
from ..settings.base import Lora, OnPolicy
from .common import Checkpoints, build_engine
from .session import open_session

SHOWN = 12  # trajectories of a step kept for the report
PARTS = {
    "right_answer": "right answer",
    "success": "solved",
    "penalty": "format penalty",
    "bonus": "bonus for states",
}  # shown beside the reward


@dataclass(frozen=True, kw_only=True)
class Drill:
    """What one kind of RL stage adds. Episodes may be of any type that `play` and `turns` understand."""

    params: SamplingParams
    microbatch_tokens: int
    episodes_of: Callable[[int], list[Any]]  # of a step, this rank's part, whole groups only
    progress: Callable[[dict[str, Any]], str]  # the values of a step in a few words
    turns: Callable[[Any], list[dict[str, Any]]] | None = None  # of an episode, as the report shows them
    measure: Callable[[Sampler, int, Sequence[Trajectory]], dict[str, Any]] = lambda sampler, step, trajectories: {}  # on every rank
    held_back: Callable[[], list[Any]] | None = None  # episodes that no step trains on, for validation
    free_text: bool = True  # length and repetition of answers are watched
    play: Callable[[Sampler, list[Any], SamplingParams, int], list[Trajectory]] = rollout
    refill: Callable[[int, int], list[Any]] | None = None
    counts: dict[str, int] = field(default_factory=dict)  # kept in checkpoints; `measure` adds to them
    spent: Callable[[], bool] = lambda: False  # stop after this step


class _Spent(Exception):
    """The budget is used up, and the stage has saved."""


def practise(stage: OnPolicy, job: Job, drill: Drill, lora: Lora | None = None) -> dict[str, Any]:
    """Train to the last step or until the budget is spent; steps, gradient tokens and the drill's counts come back."""
    name = stage.name
    job.mesh.require_even(stage.prompts_per_step, f"stages: {name}.prompts_per_step")
    updates = Updates(stage.updates_per_rollout, stage.epochs_per_rollout)
    engine, frozen = build_engine(job, stage.optimizer, stage.init, lora), build_engine(job, None, stage.init)
    checkpoints = Checkpoints(job, name, stage.checkpoint_every, stage.steps)
    start, kept = checkpoints.resume(engine, beside=("critic",) if "values" in needs(stage.algorithm) else ())
    drill.counts.update({key: kept[key] for key in drill.counts if key in kept})
    if start and drill.spent():
        checkpoints.last = start  # killed between the last save and the end
    progress = Progress(name, stage.steps, start=start, speak=job.mesh.is_main)
    done = {"steps": start, "tokens": kept.get("tokens", 0)}

    def reference(batches: list[PackedBatch]) -> list[torch.Tensor]:
        return [r["logprob"] for r in frozen.score(batches, logprob_score(stage.temperature))]

    def record(step: int, values: dict[str, Any], episodes: Sequence[Any], trajectories: Sequence[Trajectory]) -> None:
        values = session.observe(step, values, trajectories, limit=drill.params.max_new_tokens if drill.free_text else None)
        values = values | drill.measure(session.sampler, step, trajectories)
        if drill.spent():
            checkpoints.last = step + 1
        if not job.mesh.is_main:
            return
        job.run.metrics.append(name, step + 1, values)
        if drill.turns is not None and (step % stage.rollouts_every == 0 or step + 1 == checkpoints.last):
            job.run.write_rollouts(name, step + 1, picture(step + 1, episodes, trajectories, drill.turns))
        progress.update(step + 1, drill.progress(values))

    with open_session(job, name, engine, stage.rollouts, start, kept, updates.count) as session:
        write, seed = session.saving(checkpoints), fold(job.recipe.seed, 2)

        def save(step: int, state: dict[str, Any]) -> None:
            write(step, {**state, **drill.counts})
            done.update(tokens=state["tokens"], steps=step)
            if step == checkpoints.last < stage.steps:
                raise _Spent

        try:
            reinforce(
                engine,
                session.sampler,
                session.issuing(drill.episodes_of),
                stage.algorithm,
                drill.params,
                Hooks(job.mesh, record, save),
                steps=range(start, checkpoints.last),
                tokens=done["tokens"],
                microbatch_tokens=drill.microbatch_tokens,
                drift_gate=stage.drift_gate,
                seed=seed,
                reference=reference,
                kl_every=stage.rollouts_every,
                updates=updates,
                critic=session.with_critic(stage.algorithm, stage.critic, stage.init, checkpoints, start),
                ahead=session.ahead,
                publish=session.publish,
                rollout_deadline_s=stage.rollouts.deadline_s,
                max_invalid_share=stage.rollouts.max_invalid_share,
                play=drill.play,
                refill=drill.refill,
                rest=session.rest,
                **({"validate": session.validation(drill.held_back, drill.params, seed, drill.play)} if drill.held_back else {}),
            )
        except _Spent:
            pass
    return {**done, **drill.counts, "checkpoint": checkpoints.final()}


def picture(
    step: int, episodes: Sequence[Any], trajectories: Sequence[Trajectory], turns: Callable[[Any], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """A few trajectories as the report shows them."""
    return [
        {
            "step": step,
            "prompt_id": t.prompt_id,
            "sample": t.sample_index,
            "reward": None if isinstance(t.reward, Invalid) else t.reward,
            "invalid": t.reward.reason if isinstance(t.reward, Invalid) else None,
            **{label: t.info[key] for key, label in PARTS.items() if key in t.info},
            "turns": turns(e),
        }
        for e, t in list(zip(episodes, trajectories, strict=True))[:SHOWN]
    ]
