"""The tables, clips and summary of an evaluation: every model beside the still picture, the decoded true tokens and
rejected repeats.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...data.png import encode_apng, encode_png
from ..evaluation import TEST, Evaluation, Results
from ..rewards.video import BETTER_HIGH
from ..statistics import Estimate, mean, mean_or_share
from .config import VideoEnvironment
from .evaluate import MOVED, ClipScores, best_of, clip_means, estimate
from .imagine import ClipDecoder, ClipTask, to_frames

VIDEOS = "videos"  # the folder of the run that the report takes moving pictures from
DELAY_MS = 350
STILL = "the last given frame for ever"


@dataclass(frozen=True)
class ClipJudgement:
    """What one sample of a clip is worth; the first one has also what stands beside it in tables."""

    score: ClipScores
    retried: ClipScores | None = None  # where repeats are rejected
    still: ClipScores | None = None  # of the last given frame for ever
    truth: ClipScores | None = None  # of the true tokens


class VideoResults:
    """What an evaluation leaves, at one of its temperatures: the last, unless another is named."""

    def __init__(
        self, settings: VideoEnvironment, evaluation: Evaluation, decoder: ClipDecoder, temperature: float | None = None
    ) -> None:
        self.settings, self.evaluation, self.decoder = settings, evaluation, decoder
        self.temperature = evaluation.temperatures[-1] if temperature is None else temperature
        judged: dict[str, list[list[ClipJudgement]]] = {
            m: evaluation.judged[m, self.temperature, TEST] for m in evaluation.models
        }
        self.scores = {
            m: [ClipScores.joined([j.score for j in run]) for run in zip(*clips, strict=True)]
            for m, clips in judged.items()
        }
        firsts = {m: [samples[0] for samples in clips] for m, clips in judged.items()}
        self.retried = {m: _joined([j.retried for j in clips]) for m, clips in firsts.items()}
        beside = firsts[evaluation.models[0]]
        still, truth = _joined([j.still for j in beside]), _joined([j.truth for j in beside])
        assert still is not None and truth is not None, "the first sample of every clip has both"
        self.still, self.truth = still, truth
        sampled = max(map(len, self.scores.values()))  # once, where it is greedy
        self.runs = min(settings.runs or sampled, sampled)

    def averaged(self, model: str, metric: str) -> np.ndarray:
        """[C]: a metric of every clip, over frames and runs."""
        return clip_means(self.scores[model][: self.runs], metric)

    def results(self) -> Results:
        """Tables, numbers, clips and summary."""
        evaluation = self.evaluation
        others = [t for t in evaluation.temperatures if t != self.temperature]
        tables = {"": self.table()}
        tables |= {f"t{t:g}": VideoResults(self.settings, evaluation, self.decoder, t).table() for t in others}
        if self.settings.best_of:
            tables["best-of"] = self.best_table()
        both = evaluation.before and evaluation.after
        clips = self.clips()
        pages = {VIDEOS: {"title": "Held-out clips", "clips": clips}} if clips else {}
        return Results(tables, self.outcome(), self.summary() if both else None, pages)

    def outcome(self) -> dict[str, Any]:
        """Means, and differences of the same clips."""
        measured = (*self.settings.metrics, MOVED)
        after, before, control = self.evaluation.after, self.evaluation.before, self.evaluation.control
        means = {model: {m: self.averaged(model, m) for m in measured} for model in self.evaluation.models}
        outcome: dict[str, Any] = {
            f"{name}/{m}": estimate(values).value for name, by in means.items() for m, values in by.items()
        }
        for other in (before, control):
            if after and other:
                pairs = {m: estimate(means[after][m] - means[other][m]).to_cell() for m in measured}
                outcome |= {f"{after} minus {other}/{m}": cell for m, cell in pairs.items()}
        return outcome

    def table(self) -> dict[str, Any]:
        """Every metric of all that are compared."""
        measured = [*self.settings.metrics, MOVED]
        columns = [*measured, "repeats"]

        def row(name: str, kind: str, runs: Sequence[ClipScores]) -> dict[str, Any]:
            cells = [estimate(clip_means(runs, m)).to_cell() for m in measured]
            return {
                "name": name,
                "kind": kind,
                "cells": [*cells, mean_or_share(np.mean([r.repeats_C for r in runs], 0).tolist()).to_cell()],
            }

        still = row(STILL, "baseline", [self.still])
        rows = [{**still, "cells": [*still["cells"][:-1], 1.0]}]
        for name in self.evaluation.models:
            rows.append(row(name, self.evaluation.kind_of(name), self.scores[name][: self.runs]))
            if (retried := self.retried[name]) is not None:
                rows.append(row(f"{name}, repeats sampled again", "control", [retried]))
        rows.append(row("the true tokens, decoded", "other", [self.truth]))
        layout, top_k = self.decoder.layout, self.settings.top_k or "off"
        note = (
            f"n = {len(self.truth.rows)} held-out clips, {layout.horizon} frames predicted from {layout.history} "
            f"given, temperature {self.temperature:g}, top_k {top_k}; means over frames and sampling runs "
            f"({self.runs}), 95 % intervals over clips. The column moved is the mean error of pixels that differ from "
            "the last given frame."
        )
        if self.runs > 1:
            spreads = "; ".join(self.run_spread(m) for m in self.settings.metrics)
            note += f" Standard deviation over the sampling runs: {spreads}."
        lower = [c for c in columns if c not in BETTER_HIGH]
        return {"title": "Held-out clips", "columns": columns, "rows": rows, "note": note, "lower": lower}

    def run_spread(self, metric: str) -> str:
        """How much sampling runs differ, in words."""
        means = {m: [float(r.metrics[metric].mean()) for r in runs[: self.runs]] for m, runs in self.scores.items()}
        spreads = {model: np.std(values, ddof=1) for model, values in means.items()}
        return f"{metric} " + ", ".join(f"{model} {spread:.2g}" for model, spread in spreads.items())

    def best_table(self) -> dict[str, Any]:
        """The best-of-N curve of the headline metric."""
        m, sizes = self.settings.headline, self.settings.best_of
        still = estimate(self.still.metrics[m].mean(1)).to_cell()
        rows: list[dict[str, Any]] = [{"name": STILL, "kind": "baseline", "cells": [still] * len(sizes)}]
        for name, runs in self.scores.items():
            rows.append({"name": name, "kind": "model", "cells": [best_of(runs, m, k).to_cell() for k in sizes]})
        columns = [f"best of {k}" for k in sizes]
        note = (
            f"Each clip's best {m} of N samples, chosen by the truth: what sampling could reach, not what a user gets."
        )
        lower = [] if m in BETTER_HIGH else columns
        return {"title": f"Best of N by {m}", "columns": columns, "rows": rows, "note": note, "lower": lower}

    def clips(self) -> list[dict[str, Any]]:
        """Given frame, truth and every model side by side, as a moving picture and as a sheet of frames."""
        few = [clip.task(i) for i, clip in enumerate(self.evaluation.tasks[TEST][: self.settings.shown])]
        if not few:
            return []
        panels = {"truth": np.stack([t.truth_THW3 for t in few])}
        for name, runs in self.scores.items():
            panels[name] = to_frames(self.decoder.pictures(runs[0].rows[: len(few)])[0])
        return [self._clip(i, task, {name: frames[i] for name, frames in panels.items()}) for i, task in enumerate(few)]

    def _clip(self, i: int, task: ClipTask, panels: dict[str, np.ndarray]) -> dict[str, Any]:
        still = np.repeat(task.given_HW3[None], len(task.truth_THW3), 0)
        strip = np.concatenate([still, *panels.values()], 2)
        first = np.concatenate([task.given_HW3] * (1 + len(panels)), 1)
        sheet = np.concatenate([np.concatenate(list(frames), 1) for frames in panels.values()], 0)
        return {
            "title": f"clip {task.prompt_id}",
            "panels": ["given", *panels],
            "rows": list(panels),
            "frames": len(task.truth_THW3),
            "moving": base64.b64encode(encode_apng(np.concatenate([first[None], strip]), DELAY_MS)).decode(),
            "sheet": base64.b64encode(encode_png(np.ascontiguousarray(sheet))).decode(),
            "metrics": {
                name: {m: [round(float(v), 5) for v in runs[0].metrics[m][i]] for m in self.settings.metrics}
                for name, runs in self.scores.items()
            },
        }

    def summary(self) -> dict[str, Any]:
        """What happened, in plain words."""
        evaluation, m = self.evaluation, self.settings.headline
        assert evaluation.before and evaluation.after
        sign = 1.0 if m in BETTER_HIGH else -1.0
        before, after = (self.averaged(name, m) for name in (evaluation.before, evaluation.after))
        gain = mean([float(v) for v in sign * (after - before)])
        verb = "improved" if gain.low > 0 else "worsened" if gain.high < 0 else "did not clearly change"
        headline = f"RLVR {verb} the {m} of predicted frames from {before.mean():.4f} to {after.mean():.4f}."
        repeats = {
            name: float(np.mean([r.repeats_C.mean() for r in runs[: self.runs]])) for name, runs in self.scores.items()
        }
        paragraphs = [
            f"Gain {interval(gain)} on the same {gain.n} held-out clips. The last given frame for ever has "
            f"{self.still.metrics[m].mean():.4f}, the true tokens decoded {self.truth.metrics[m].mean():.4f}.",
            "Clips whose last two frames are the same tokens: "
            + ", ".join(f"{name} {100 * share:.1f} %" for name, share in repeats.items())
            + ".",
        ]
        if evaluation.control:
            control = self.averaged(evaluation.control, m)
            gap = mean([float(v) for v in sign * (after - control)])
            paragraphs.append(
                f"Control, more pre-training for the same gradient tokens: {control.mean():.4f} (RLVR is better by "
                f"{interval(gap)})."
            )
        return {"headline": headline, "paragraphs": paragraphs}


def _joined(parts: Sequence[ClipScores | None]) -> ClipScores | None:
    there = [part for part in parts if part is not None]
    return ClipScores.joined(there) if there else None


def interval(e: Estimate) -> str:
    """A change with its interval."""
    return f"{e.value:+.4f} (95 % interval {e.low:+.4f} to {e.high:+.4f})"
