"""A phase's experience: all new steps, and earlier steps chosen by the actor's perplexity. What was chosen is a list
of places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.files import make_folder, read_json, write_json
from ...data.packing import TrainSequence
from ...rl.objective import logprob_score
from ...rl.webrl.replay import bins, candidates, choose, geometric_mean
from ...rl.webrl.steps import WebStep, WebTrajectory
from ..job import Job
from ..settings.web import WebReplay
from .common import build_engine
from .web import draw_seed, prompter_of, read_steps, score_all

CHOSEN = "chosen.json"


@dataclass(frozen=True)
class Experience:
    """Trajectories, and the steps of them that are trained on as (trajectory, step)."""

    trajectories: list[WebTrajectory]
    steps: list[tuple[int, int]]

    def step(self, place: tuple[int, int]) -> WebStep:
        return self.trajectories[place[0]].steps[place[1]]


def experience_of(job: Job, stage: str) -> Experience:
    """What a finished web-replay stage chose."""
    replay: WebReplay = next(s for s in job.recipe.stages if s.name == stage)  # type: ignore[assignment]
    new = read_steps(job, replay.new)
    chosen: dict[str, list[int]] = {}
    for key, step in read_json(job.stage_folder(stage) / CHOSEN)["chosen"]:
        chosen.setdefault(key, []).append(step)
    earlier = [t for name in replay.earlier for t in read_steps(job, name) if t.key in chosen]
    places = [(n, i) for n, t in enumerate(new) for i, s in enumerate(t.steps) if s.learn]
    places += [(len(new) + n, i) for n, t in enumerate(earlier) for i in sorted(chosen[t.key])]
    return Experience([*new, *earlier], places)


def run(stage: WebReplay, job: Job) -> dict[str, Any]:
    """Score the candidates under the phase's actor and choose."""
    new = sum(s.learn for t in read_steps(job, stage.new) for s in t.steps)
    earlier = [t for name in stage.earlier for t in read_steps(job, name)]
    seed = draw_seed(job.recipe, stage)
    places = candidates(earlier, seed) if stage.ratio else []
    probabilities: list[float] = []
    if places:
        prompter = prompter_of(job)
        engine = build_engine(job, None, stage.actor)
        steps = [earlier[p.trajectory].steps[p.step] for p in places]
        # without the token that ends an action, as the release measures it
        rows = [TrainSequence(np.asarray([*s.prompt, *prompter.action(s.action)], np.int64)) for s in steps]
        logprobs = score_all(job, engine, rows, logprob_score(1.0), stage.microbatch_tokens)["logprob"]
        probabilities = [geometric_mean(logprobs[i][len(s.prompt) :].tolist()) for i, s in enumerate(steps)]
    chosen = choose(places, probabilities, new, seed, stage.low, stage.high, stage.ratio)
    if job.mesh.is_main:
        folder = make_folder(job.stage_folder(stage.name))
        job.run.guard()
        write_json(folder / CHOSEN, {"chosen": [[earlier[p.trajectory].key, p.step] for p in chosen]})
        table = bins(probabilities, stage.low, stage.high)
        rows_ = [{"name": name, "kind": "model", "cells": [e.to_cell()]} for name, e in table.items() if e.n]
        note = (
            f"{len(places)} steps of earlier successes, one success a task; {len(chosen)} are replayed beside "
            f"{new} new steps."
        )
        job.run.write_result(
            stage.name,
            {"title": f"Perplexity of earlier steps, {stage.name}", "columns": ["share"], "rows": rows_, "note": note},
        )
    return {
        "new": new,
        "candidates": len(places),
        "replayed": len(chosen),
        **{name: e.value for name, e in bins(probabilities, stage.low, stage.high).items() if e.n},
    }
