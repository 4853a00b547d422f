"""RLVR of a video world model: clips are imagined with their true actions forced in, decoded, and compared with what happened."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ...core.rng import permutation
from ...data.trajectory import Invalid, Trajectory
from ...rl.rewards.video import require_weights
from ...rl.rollout.sampler import SamplingParams
from ...rl.video.imagine import ClipDecoder, ImaginedClip, Judge
from ..job import Job
from ..settings.video import VideoReinforce
from .on_policy import StageTrainer
from .video import TokenClips, tokenizer


def check(stage: VideoReinforce, job: Job) -> None:
    """The weights of the metrics that are rewarded are there."""
    require_weights(name for name, weight in stage.reward.weights.items() if weight)


def run(stage: VideoReinforce, job: Job) -> dict[str, Any]:
    """Train to the last step and say how many gradient tokens it took."""
    outcome = VideoTrainer(stage, job).train()
    if job.mesh.is_main:
        job.run.write_result(f"{stage.name}-time", time_table(stage.name, [r for r in job.run.metrics.rows() if r["stage"] == stage.name]))
    return outcome


class VideoTrainer(StageTrainer):
    """RL on clips, imagined and compared with what happened."""

    free_text = shows_turns = False

    def __init__(self, stage: VideoReinforce, job: Job) -> None:
        self.clips = TokenClips(job, stage.data, "train")
        layout = self.clips.layout
        decoder = ClipDecoder(tokenizer(job, self.clips.stage.tokenizer), layout, stage.bf16)
        self.judge = Judge(decoder, stage.reward.weights, stage.reward.aggregate, stage.reward.repetition_penalty)
        allowed = layout.ids_of("frame") if stage.visual_ids_only else None
        params = SamplingParams(max_new_tokens=layout.sampled, temperature=stage.temperature, allowed=allowed)
        super().__init__(stage, job, params, stage.microbatch_sequences * layout.total)

    def deal(self, number: int) -> list[ImaginedClip]:
        made: list[ImaginedClip] = []
        for prompt in self.places(number):
            epoch, at = divmod(prompt, len(self.clips))
            task = self.clips.task(_order(len(self.clips), self.job.recipe.seed, epoch)[at], prompt)
            made += [ImaginedClip(task, k, self.clips.layout, self.judge) for k in range(self.stage.samples_per_prompt)]
        return made

    def measure(self, step: int, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        judge = self.judge
        speed = {"time/judge_s": judge.seconds, "time/judged_frames_per_s": judge.pictures / max(judge.seconds, 1e-9)}
        judge.seconds, judge.pictures = 0.0, 0
        return described(self.job, trajectories) | room(self.job, trajectories) | speed

    def progress(self, values: dict[str, Any]) -> str:
        return f"reward {values['reward/mean']:.4f}"


@lru_cache(maxsize=1)
def _order(count: int, seed: int, epoch: int) -> list[int]:
    return permutation(count, seed, 31, epoch)


def time_table(name: str, steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Where the time of a step goes; the first of several warms up and is left out."""
    steps = steps[1:] or steps
    whole, rollout, judge = (statistics.median(row[f"time/{part}_s"] for row in steps) for part in ("step", "rollout", "judge"))
    parts = {"sampling": rollout - judge, "judging": judge, "learning": whole - rollout}
    cells = [whole, *(seconds / whole for seconds in parts.values()), statistics.median(r["time/judged_frames_per_s"] for r in steps)]
    columns = ["step, s", *(f"share of {part}" for part in parts), "judged frames/s"]
    note = f"Medians over {len(steps)} steps; judging is decoding all samples of a step and comparing them with the truth."
    return {"title": f"Time of a step: {name}", "columns": columns, "rows": [{"name": name, "kind": "model", "cells": cells}], "note": note}


def described(job: Job, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means of the metrics and of repetition over all valid samples."""
    mine = [t.info for t in trajectories if not isinstance(t.reward, Invalid)]
    everyone = [info for part in job.mesh.gather(mine) for info in part]
    if not everyone:
        return {}
    return {f"clip/{name}": sum(float(info[name]) for info in everyone) / len(everyone) for name in everyone[0]}


def room(job: Job, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """How much the samples of one clip differ: without a spread inside groups there is nothing to learn from."""
    groups: dict[int, list[float]] = {}
    for part in job.mesh.gather([(t.prompt_id, t.reward) for t in trajectories if not isinstance(t.reward, Invalid)]):
        for prompt, reward in part:
            groups.setdefault(prompt, []).append(reward)
    held = [g for g in groups.values() if len(g) > 1]
    if not held:
        return {}
    spread = statistics.fmean(statistics.stdev(g) for g in held)
    return {"reward/group_std": spread, "reward/best_minus_mean": statistics.fmean(max(g) - statistics.fmean(g) for g in held)}
