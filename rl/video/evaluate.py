"""Scores of imagined clips on held-out ones: picture metrics, repetition, rejection of repeats, best of N; and what is
trivial.

Shapes: C clips, R sampling runs, T predicted frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...core.errors import TerrellaError
from ...core.rng import fold
from ...data.trajectory import Invalid
from ..rewards.video import BETTER_HIGH, Metric, frame_metrics
from ..rollout.episodes import rollout
from ..rollout.sampler import Sampler, SamplingParams
from ..statistics import Estimate, mean
from .imagine import ClipDecoder, ClipTask, ImaginedClip, to_pictures

MOVED = "moved"  # the error of the pixels that moved, beside the metrics
MOVED_BY = 0.1  # a difference in some colour that is more than shading


@dataclass(frozen=True)
class ClipScores:
    """One run over all clips."""

    metrics: dict[str, np.ndarray]  # [C, T] each; `moved` is NaN where nothing moved
    repeats_C: np.ndarray  # whether the last frame's codes equal those of the one before
    rows: np.ndarray  # [C, L] tokens with the predictions in them

    def each(self) -> list[ClipScores]:
        """The clips one by one."""
        one = [slice(i, i + 1) for i in range(len(self.rows))]
        return [
            ClipScores({name: value[i] for name, value in self.metrics.items()}, self.repeats_C[i], self.rows[i])
            for i in one
        ]

    @staticmethod
    def joined(parts: Sequence[ClipScores]) -> ClipScores:
        """Clips side by side."""
        metrics = {name: np.concatenate([p.metrics[name] for p in parts]) for name in parts[0].metrics}
        return ClipScores(
            metrics, np.concatenate([p.repeats_C for p in parts]), np.concatenate([p.rows for p in parts])
        )

    def merge(self, other: ClipScores, where: np.ndarray) -> ClipScores:
        """The other's clips at these places."""
        metrics = {name: value.copy() for name, value in self.metrics.items()}
        repeats, rows = self.repeats_C.copy(), self.rows.copy()
        for name in metrics:
            metrics[name][where] = other.metrics[name]
        repeats[where], rows[where] = other.repeats_C, other.rows
        return ClipScores(metrics, repeats, rows)


def imagine(
    sampler: Sampler,
    tasks: Sequence[ClipTask],
    decoder: ClipDecoder,
    names: tuple[Metric, ...],
    params: SamplingParams,
    run: int,
    seed: int,
) -> ClipScores:
    """One sample of every clip. A fault of the sampler that stays after retries is an error: no table has holes."""
    episodes = [ImaginedClip(task, run, decoder.layout, None) for task in tasks]
    for trajectory, episode in zip(rollout(sampler, episodes, params, seed), episodes, strict=True):
        if episode.sample is None:
            raise RuntimeError(
                f"clip {episode.prompt_id}: "
                f"{trajectory.reward.reason if isinstance(trajectory.reward, Invalid) else ''}"
            )
    return score_rows(np.array([e.row() for e in episodes], np.int64), tasks, decoder, names)


def score_rows(
    rows: np.ndarray, tasks: Sequence[ClipTask], decoder: ClipDecoder, names: tuple[Metric, ...]
) -> ClipScores:
    """Tokens against the true frames; the true tokens give what the tokenizer alone costs."""
    scored = decoder.score(rows, [t.truth_THW3 for t in tasks], names)
    repeats = (scored.codes_BTN[:, -1] == scored.codes_BTN[:, -2]).all(-1).cpu().numpy()
    metrics = {name: value.cpu().numpy() for name, value in scored.metrics.items()}
    for name, values_CT in metrics.items():  # only `moved` may lack a value
        if lost := np.isnan(values_CT).sum():
            raise TerrellaError(
                f"metric '{name}' is NaN in {lost} of {values_CT.size} decoded frames; look at the tokenizer"
            )
    moved = [moved_error(picture, task) for picture, task in zip(scored.pictures_BT3HW, tasks, strict=True)]
    return ClipScores(metrics | {MOVED: np.stack(moved)}, repeats, rows)


def moved_error(pictures_T3HW: torch.Tensor, task: ClipTask) -> np.ndarray:
    """[T]: mean absolute error of the pixels that truly differ from the last given frame; NaN in frames where none
    does.
    """
    true, given = (to_pictures(x, pictures_T3HW.device) for x in (task.truth_THW3, task.given_HW3))
    moved_THW = (true - given).abs().amax(1) > MOVED_BY
    error_THW = (pictures_T3HW - true).abs().mean(1)
    return ((error_THW * moved_THW).sum((1, 2)) / moved_THW.sum((1, 2))).cpu().numpy()


def without_repeats(
    scores: ClipScores,
    tries: int,
    sampler: Sampler,
    tasks: Sequence[ClipTask],
    decoder: ClipDecoder,
    names: tuple[Metric, ...],
    params: SamplingParams,
    seed: int,
) -> ClipScores:
    """The rejection baseline: clips that repeat their last frame are sampled again with another seed, so many times
    at most.
    """
    for attempt in range(1, tries + 1):
        where = np.flatnonzero(scores.repeats_C)
        if not len(where):
            break
        again = imagine(sampler, [tasks[i] for i in where], decoder, names, params, 0, fold(seed, attempt))
        scores = scores.merge(again, where)
    return scores


def copy_baseline(tasks: Sequence[ClipTask], names: tuple[Metric, ...], device: Any) -> dict[str, np.ndarray]:
    """The last given frame for ever; [C, T] each."""
    out: dict[str, list[np.ndarray]] = {name: [] for name in (*names, MOVED)}
    for task in tasks:
        true = to_pictures(task.truth_THW3[None], device)
        still = to_pictures(task.given_HW3[None, None], device).expand_as(true)
        for name, value in frame_metrics(still, true, names).items():
            out[name].append(value.cpu().numpy()[0])
        out[MOVED].append(moved_error(still[0], task))
    return {name: np.stack(values) for name, values in out.items()}


def clip_means(runs: Sequence[ClipScores], name: str) -> np.ndarray:
    """[C]: a metric averaged over frames and runs."""
    return over_frames(np.mean([run.metrics[name] for run in runs], 0))


def over_frames(values_CT: np.ndarray) -> np.ndarray:
    """[C]: the mean of the frames that have a value; NaN where none has."""
    there = ~np.isnan(values_CT)
    with np.errstate(invalid="ignore"):
        return np.where(there, values_CT, 0.0).sum(1) / there.sum(1)


def estimate(values_C: np.ndarray) -> Estimate:
    """A mean over the clips that have a value, with its interval."""
    return mean([float(v) for v in values_C if not np.isnan(v)])


def best_of(runs: Sequence[ClipScores], name: str, size: int) -> Estimate:
    """Each clip's best of the first `size` samples, averaged."""
    each = np.stack([run.metrics[name].mean(1) for run in runs[:size]])
    return estimate(each.max(0) if name in BETTER_HIGH else each.min(0))
