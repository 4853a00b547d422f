"""What WebRL's stages share: the recipe's web sites and prompts, kept trajectories, scoring over ranks, and one
training loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from ...core.engine import Engine, LossFn, ScoreFn
from ...core.errors import ConfigError
from ...core.files import read_json
from ...core.rng import fold, permutation
from ...data.balance import spread
from ...data.packing import TrainSequence
from ...rl.webrl.config import WebSiteEnvironment
from ...rl.webrl.prompts import Prompter
from ...rl.webrl.steps import WebTrajectory, read_trajectories
from ..job import Job
from ..recipe import Recipe
from ..settings.web import Training, WebJudge, WebReplay, WebTasks
from .collect import HELD_OUT, OTHERS, TRAIN
from .fit import Portion, fit
from .verbs import tokenizer_of

VERDICTS = "verdicts.json"  # of the outcome reward model, by the key of an episode


def sites_of(job: Job) -> WebSiteEnvironment:
    """The web sites that the recipe is about."""
    if not isinstance(job.recipe.env, WebSiteEnvironment):
        raise ConfigError(
            "env: web stages need the web sites that agents act on; give the recipe env: {kind: web-site, ...}"
        )
    return job.recipe.env


def prompter_of(job: Job, verdict: bool = False) -> Prompter:
    """Prompts with the start's tokenizer and the lengths of the recipe's sites."""
    sites = sites_of(job)
    limit = sites.max_verdict_tokens if verdict else sites.max_prompt_tokens
    return Prompter(tokenizer_of(job), limit, sites.pad_prompts_to)


def draw_seed(recipe: Recipe, stage: WebTasks | WebReplay) -> int:
    """The seed of what a stage draws: by the sum of its name's letters, and by its place among stages of the same
    sum, as in `webrl-11-tasks` and `webrl-20-tasks`.
    """
    letters = sum(map(ord, stage.name))
    alike = [s.name for s in recipe.stages if s.kind == stage.kind and sum(map(ord, s.name)) == letters]
    place = alike.index(stage.name)
    return fold(recipe.seed, letters, place) if place else fold(recipe.seed, letters)


def read_played(job: Job, stage: str) -> list[WebTrajectory]:
    """The episodes that a collect stage left, as the world judged them."""
    return read_trajectories(job.stage_folder(stage) / part for part in (TRAIN, HELD_OUT, OTHERS))


def read_steps(job: Job, stage: str) -> list[WebTrajectory]:
    """The episodes of a collect stage, or those that a stage of verdicts judged; their keys say where they come
    from.
    """
    settings = next(other for other in job.recipe.stages if other.name == stage)
    if isinstance(settings, WebJudge):
        verdicts = read_json(job.stage_folder(stage) / VERDICTS)
        kept = [t.labelled(verdicts[t.key]) for t in read_played(job, settings.data)]
    else:
        kept = read_played(job, stage)
        if any(t.score is None for t in kept):
            raise ConfigError(
                f"stages: the tasks of '{stage}' have no ground truth; let a stage of kind web-judge judge its "
                "episodes, and name that one"
            )
    return [replace(t, key=f"{stage}/{t.key}") for t in kept]


def score_all(
    job: Job, engine: Engine, rows: Sequence[TrainSequence], score: ScoreFn, budget: int
) -> dict[str, dict[int, np.ndarray]]:
    """Per-token results of all rows by name and row, each data rank scoring its part."""
    longest = max(len(row.ids) for row in rows)
    shared = spread(job.mesh.share(rows), max(budget, longest), job.mesh, job.model.hidden)
    scored = engine.score(shared.batches, score)
    own = {name: shared.to_owners([s[name] for s in scored]) for name in scored[0]}
    parts = job.mesh.gather(own)
    return {name: dict(enumerate(v for part in parts for v in part[name])) for name in own}


def fit_items(
    job: Job,
    stage: str,
    engine: Engine,
    training: Training,
    count: int,
    rows: Callable[[list[int], list[int]], list[TrainSequence]],
    loss: LossFn,
    describe: Callable[[dict[str, float]], dict[str, float]],
) -> dict[str, Any]:
    """Train on `count` items in a fresh order every epoch. `rows(share, whole)` makes this rank's sequences of a step,
    `whole` being all of the step's items."""
    each = training.sequences_per_step
    order = lru_cache(maxsize=2)(lambda epoch: permutation(count, fold(job.recipe.seed, 21), epoch))

    def portion(step: int) -> Portion:
        whole = [order(place // count)[place % count] for place in range(step * each, (step + 1) * each)]
        made = rows(list(job.mesh.share(whole)), whole)
        return spread(made, training.microbatch_tokens, job.mesh, job.model.hidden).batches, {}

    steps = max(1, round(training.epochs * count / each))
    return {"steps": steps, "items": count, **fit(job, stage, engine, training, steps, portion, loss, describe)}
