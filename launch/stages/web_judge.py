"""The outcome reward model's verdicts on the episodes of a collect stage, which later stages believe in place of the
world's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.errors import ConfigError
from ...core.files import make_folder, write_json
from ...data.tokenizers import load_tokenizer
from ...models.hub import resolve
from ...rl.statistics import Estimate
from ...rl.webrl.orm import NO, YES, accuracy, labels
from ...rl.webrl.prompts import EOT, JUDGE, SYSTEM
from ..job import Job
from ..settings.verbs import Start
from ..settings.web import WebJudge
from .common import build_engine
from .verbs import tokenizer_of
from .web import VERDICTS, read_played
from .web_orm import probabilities


def check(stage: WebJudge, job: Job) -> None:
    """A reward model of a folder of its own reads the tokens of the recipe's start, or its verdicts mean nothing."""
    orm = next(other for other in job.recipe.stages if other.name == stage.orm)
    if not isinstance(orm, Start) or not orm.folder or not job.mesh.is_main:
        return
    words = f"{SYSTEM}{JUDGE}{EOT} {YES}{NO}"
    if load_tokenizer(resolve(orm.folder)).encode(words) != tokenizer_of(job).encode(words):
        raise ConfigError(
            f"stages: {orm.name}.folder = {orm.folder} has another tokenizer than the recipe's start; the episodes "
            "that it judges are written in the start's tokens"
        )


def run(stage: WebJudge, job: Job) -> dict[str, Any]:
    """Judge all episodes, and say how often the world agrees where it knows."""
    played = read_played(job, stage.data)
    scores = probabilities(job, build_engine(job, None, stage.orm), played)
    if job.mesh.is_main:
        folder = make_folder(job.stage_folder(stage.name))
        job.run.guard()
        write_json(folder / VERDICTS, {t.key: score for t, score in zip(played, scores, strict=True)})
    known = [(score, t.success) for score, t in zip(scores, played, strict=True) if t.score is not None]
    said, truth = [score for score, _ in known], [truth for _, truth in known]
    agreed = {**accuracy(said, truth), **labels(said, truth)} if known else {}
    if job.mesh.is_main and known:
        job.run.write_result(stage.name, _table(stage, agreed, len(known)))
    successes = sum(t.labelled(score).success for t, score in zip(played, scores, strict=True))
    return {
        "trajectories": len(played),
        "invalid": job.outcome(stage.data)["invalid"],
        "steps": sum(len(t.steps) for t in played),
        "successes": successes,
        "solved": sum((t.score or 0.0) >= 1.0 for t in played),
        "success_rate": successes / max(len(played), 1),
        **{f"orm/{name}": getattr(value, "value", value) for name, value in agreed.items()},
    }


def _table(stage: WebJudge, agreed: Mapping[str, Estimate | None], known: int) -> dict[str, Any]:
    """The labels of this stage beside the world's score, which training does not see."""
    columns = {
        "precision": "precision",
        "recall": "recall",
        "base": "precision of always YES",
        "accuracy": "accuracy",
        "balanced": "mean of both classes",
    }
    cells = [value.to_cell() if (value := agreed[name]) is not None else "none" for name in columns]
    return {
        "title": f"Labels of the outcome reward model: {stage.name}",
        "columns": list(columns.values()),
        "rows": [{"name": stage.orm, "kind": "model", "cells": cells}],
        "note": f"{known} episodes of {stage.data}, against the world's score, which later stages do not see. "
        "Wilson's 95 % intervals.",
    }
