"""Held-out clips: every model beside the still picture, the decoded true tokens and the rejection baseline; clips for the report."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.files import make_folder, write_json
from ...core.progress import Progress
from ...core.rng import fold, permutation
from ...data.png import encode_apng, encode_png
from ...rl.rewards.video import BETTER_HIGH, Metric, require_weights
from ...rl.rollout.sampler import SamplingParams
from ...rl.statistics import Estimate, mean
from ...rl.video.evaluate import (
    MOVED,
    ClipScores,
    best_of,
    clip_means,
    copy_baseline,
    estimate,
    imagine,
    over_frames,
    score_rows,
    without_repeats,
)
from ...rl.video.imagine import ClipDecoder, ClipTask, to_frames
from ..job import Job
from ..settings.video import VideoEvaluate
from .common import build_engine, sampler_of, sampling
from .video import TokenClips, tokenizer

VIDEOS = "videos"
DELAY_MS = 350


def check(stage: VideoEvaluate, job: Job) -> None:
    """The weights of the metrics are there."""
    require_weights(stage.metrics)


def run(stage: VideoEvaluate, job: Job) -> dict[str, Any]:
    """Evaluate, write tables, clips and the summary in words. Every rank samples its share of the clips."""
    clips = TokenClips(job, stage.data, "heldout")
    n = min(stage.n, len(clips)) // job.mesh.data_size * job.mesh.data_size
    order = permutation(len(clips), job.recipe.seed, 41)[:n]
    tasks = [clips.task(number, at) for at, number in job.mesh.share(list(enumerate(order)))]
    decoder = ClipDecoder(tokenizer(job, clips.stage.tokenizer), clips.layout, stage.bf16)
    params = SamplingParams(max_new_tokens=clips.layout.sampled, temperature=stage.temperature, top_k=stage.top_k)
    seed = fold(job.recipe.seed, 3)
    names: tuple[Metric, ...] = tuple(stage.metrics)
    count = max([stage.runs, *stage.best_of])
    progress = Progress(stage.name, count * len(stage.models), speak=job.mesh.is_main)
    scores: dict[str, list[ClipScores]] = {}
    rejected: ClipScores | None = None
    for at, name in enumerate(stage.models):
        scores[name] = []
        with sampling(job, stage.name, build_engine(job, None, name), sampler_of(stage, job)) as sampler:
            for run in range(count):
                scores[name].append(job.mesh.from_leader(lambda s=sampler, r=run: imagine(s, tasks, decoder, names, params, r, seed)))
                progress.update(at * count + run + 1)
            if name == stage.before and stage.reject_repeats:
                again = (scores[name][0], stage.reject_repeats, sampler, tasks, decoder, names, params, seed)
                rejected = job.mesh.from_leader(lambda a=again: without_repeats(*a))
    still = copy_baseline(tasks, names, decoder.device)
    ceiling = score_rows(np.stack([t.row_L for t in tasks]), tasks, decoder, names)
    everything = gather(job, scores), gather_one(job, rejected), gather_still(job, still), gather_one(job, ceiling)
    if job.mesh.is_main:
        write(stage, job, *everything, tasks=tasks, decoder=decoder, own=scores)
    job.mesh.barrier()
    told = (*names, MOVED)
    means = {name: {m: clip_means(everything[0][name][: stage.runs], m) for m in told} for name in stage.models}
    outcome: dict[str, Any] = {f"{name}/{m}": estimate(values).value for name, found in means.items() for m, values in found.items()}
    for other in (stage.before, stage.control):
        if stage.after and other:  # paired: the same clips
            pairs = {m: estimate(means[stage.after][m] - means[other][m]).to_cell() for m in told}
            outcome |= {f"{stage.after} minus {other}/{m}": cell for m, cell in pairs.items()}
    return outcome


def gather_one(job: Job, mine: ClipScores | None) -> ClipScores | None:
    """All ranks' clips, in order."""
    parts = [part for part in job.mesh.gather(mine) if part is not None]
    if not parts:
        return None
    metrics = {name: np.concatenate([p.metrics[name] for p in parts]) for name in parts[0].metrics}
    return ClipScores(metrics, np.concatenate([p.repeats_C for p in parts]), np.concatenate([p.rows for p in parts]))


def gather(job: Job, mine: dict[str, list[ClipScores]]) -> dict[str, list[ClipScores]]:
    return {name: [whole for one in runs if (whole := gather_one(job, one)) is not None] for name, runs in mine.items()}


def gather_still(job: Job, mine: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    parts = job.mesh.gather(mine)
    return {name: np.concatenate([p[name] for p in parts]) for name in mine}


def write(
    stage: VideoEvaluate,
    job: Job,
    scores: dict[str, list[ClipScores]],
    rejected: ClipScores | None,
    still: dict[str, np.ndarray],
    ceiling: ClipScores | None,
    *,
    tasks: Sequence[ClipTask],
    decoder: ClipDecoder,
    own: dict[str, list[ClipScores]],
) -> None:
    """Tables, clips and summary."""
    assert ceiling is not None
    measured = [*stage.metrics, MOVED]
    columns = [*measured, "repeats"]
    n = len(ceiling.rows)
    rows = [
        {
            "name": "the last given frame for ever",
            "kind": "baseline",
            "cells": [estimate(over_frames(still[m])).to_cell() for m in measured] + [1.0],
        }
    ]
    for name in stage.models:
        runs = scores[name][: stage.runs]
        cells = [estimate(clip_means(runs, m)).to_cell() for m in measured]
        repeats = estimate(np.mean([r.repeats_C for r in runs], 0)).to_cell()
        rows.append({"name": name, "kind": "control" if name == stage.control else "model", "cells": [*cells, repeats]})
        if name == stage.before and rejected is not None:
            cells = [estimate(clip_means([rejected], m)).to_cell() for m in measured] + [estimate(rejected.repeats_C).to_cell()]
            rows.append({"name": f"{name}, repeats sampled again", "kind": "control", "cells": cells})
    truth = [estimate(clip_means([ceiling], m)).to_cell() for m in measured] + [estimate(ceiling.repeats_C).to_cell()]
    rows.append({"name": "the true tokens, decoded", "kind": "other", "cells": truth})
    lower = [c for c in columns if c not in BETTER_HIGH]
    note = f"n = {n} held-out clips, {clips_text(stage, decoder)}; means over frames and {stage.runs} sampling runs, "
    note += "95 % intervals over clips. The column moved is the mean error of pixels that differ from the last given frame. "
    note += "Standard deviation over the sampling runs: " + "; ".join(run_spread(stage, scores, m) for m in stage.metrics) + "."
    job.run.write_result(
        stage.name, {"title": f"Held-out clips: {stage.name}", "columns": columns, "rows": rows, "note": note, "lower": lower}
    )
    if stage.best_of:
        job.run.write_result(f"{stage.name}-best-of", best_table(stage, scores, still))
    show(stage, job, tasks, decoder, own)
    if stage.before and stage.after:
        write_json(job.run.path / "summary.json", summary(stage, scores, still, ceiling))


def clips_text(stage: VideoEvaluate, decoder: ClipDecoder) -> str:
    layout = decoder.layout
    return f"{layout.horizon} frames predicted from {layout.history} given, temperature {stage.temperature:g}, top_k {stage.top_k or 'off'}"


def run_spread(stage: VideoEvaluate, scores: dict[str, list[ClipScores]], metric: str) -> str:
    told = []
    for name in stage.models:
        means = [float(r.metrics[metric].mean()) for r in scores[name][: stage.runs]]
        told.append(f"{name} {np.std(means, ddof=1) if len(means) > 1 else math.nan:.2g}")
    return f"{metric} " + ", ".join(told)


def best_table(stage: VideoEvaluate, scores: dict[str, list[ClipScores]], still: dict[str, np.ndarray]) -> dict[str, Any]:
    """The best-of-N curve of the headline metric."""
    m = stage.headline
    rows: list[dict[str, Any]] = [
        {"name": "the last given frame for ever", "kind": "baseline", "cells": [estimate(still[m].mean(1)).to_cell()] * len(stage.best_of)}
    ]
    rows += [
        {"name": name, "kind": "model", "cells": [best_of(runs, m, k).to_cell() for k in stage.best_of]} for name, runs in scores.items()
    ]
    columns = [f"best of {k}" for k in stage.best_of]
    note = f"Each clip's best {m} of N samples, chosen by the truth: what sampling could reach, not what a user gets."
    lower = [] if m in BETTER_HIGH else columns
    return {"title": f"Best of N by {m}: {stage.name}", "columns": columns, "rows": rows, "note": note, "lower": lower}


def show(stage: VideoEvaluate, job: Job, tasks: Sequence[ClipTask], decoder: ClipDecoder, own: dict[str, list[ClipScores]]) -> None:
    """Clips for the report: given frame, truth and every model side by side, as a moving picture and as a sheet of frames."""
    few = tasks[: stage.shown]
    if not few:
        return
    panels = {"truth": np.stack([t.truth_THW3 for t in few])}
    for name in stage.models:
        panels[name] = to_frames(decoder.pictures(own[name][0].rows[: len(few)])[0])
    told = []
    for i, task in enumerate(few):
        T = len(task.truth_THW3)
        still = np.repeat(task.given_HW3[None], T, 0)
        strip = np.concatenate([still, *(p[i] for p in panels.values())], 2)
        first = np.concatenate([task.given_HW3] * (1 + len(panels)), 1)
        sheet = np.concatenate([np.concatenate(list(p[i]), 1) for p in panels.values()], 0)
        metrics = {name: {m: [round(float(v), 5) for v in own[name][0].metrics[m][i]] for m in stage.metrics} for name in stage.models}
        told.append(
            {
                "title": f"clip {task.prompt_id}",
                "panels": ["given", *panels],
                "rows": list(panels),
                "frames": T,
                "moving": base64.b64encode(encode_apng(np.concatenate([first[None], strip]), DELAY_MS)).decode(),
                "sheet": base64.b64encode(encode_png(np.ascontiguousarray(sheet))).decode(),
                "metrics": metrics,
            }
        )
    job.run.guard()
    write_json(make_folder(job.run.path / VIDEOS) / f"{stage.name}.json", {"title": f"Held-out clips: {stage.name}", "clips": told})


def summary(stage: VideoEvaluate, scores: dict[str, list[ClipScores]], still: dict[str, np.ndarray], ceiling: ClipScores) -> dict[str, Any]:
    """What happened, in plain words."""
    assert stage.before and stage.after
    m = stage.headline
    sign = 1.0 if m in BETTER_HIGH else -1.0
    before, after = (clip_means(scores[name][: stage.runs], m) for name in (stage.before, stage.after))
    gain = mean([float(v) for v in sign * (after - before)])
    verb = "improved" if gain.low > 0 else "worsened" if gain.high < 0 else "did not clearly change"
    headline = f"RLVR {verb} the {m} of predicted frames from {before.mean():.4f} to {after.mean():.4f}."
    repeats = {name: float(np.mean([r.repeats_C.mean() for r in scores[name][: stage.runs]])) for name in stage.models}
    paragraphs = [
        f"Gain {interval(gain)} on the same {gain.n} held-out clips. The last given frame for ever has {still[m].mean():.4f}, "
        f"the true tokens decoded {ceiling.metrics[m].mean():.4f}.",
        "Clips whose last two frames are the same tokens: "
        + ", ".join(f"{name} {100 * share:.1f} %" for name, share in repeats.items())
        + ".",
    ]
    if stage.control:
        control = clip_means(scores[stage.control][: stage.runs], m)
        gap = mean([float(v) for v in sign * (after - control)])
        paragraphs.append(
            f"Control, more pre-training for the same gradient tokens: {control.mean():.4f} (RLVR is better by {interval(gap)})."
        )
    return {"headline": headline, "paragraphs": paragraphs}


def interval(e: Estimate) -> str:
    return f"{e.value:+.4f} (95 % interval {e.low:+.4f} to {e.high:+.4f})"
