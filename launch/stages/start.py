"""Where models begin: weights and tokenizer of a Hugging Face folder, or fresh weights and the tokenizer of the
environment.
"""

from __future__ import annotations

from typing import Any

from ...models.hub import resolve
from ...rl.own.tasks import fresh_tokenizer
from ..job import Job
from ..settings.verbs import Start
from .common import begin, check_start, first_checkpoint
from .verbs import environments_of


def check(stage: Start, job: Job) -> None:
    """The folder is there, and is the recipe's model."""
    check_start(job, stage.name, stage.folder, text=_has_text(job))


def run(stage: Start, job: Job) -> dict[str, Any]:
    """Write the tokenizer, where tokens have a text, and the first checkpoint."""
    if not _has_text(job):
        folder = resolve(stage.folder) if stage.folder else None
        return {"steps": 0, "tokens": 0, "checkpoint": first_checkpoint(job, stage.name, folder)}
    return begin(job, stage.name, stage.folder, lambda: fresh_tokenizer(environments_of(job.recipe), job.model.vocab))


def _has_text(job: Job) -> bool:
    return getattr(job.recipe.env, "layout", None) is None  # or the tokens of its environment are codes
