"""Where models begin: weights and tokenizer of a Hugging Face folder, or fresh weights and the tokenizer of the
environment or of the user.
"""

from __future__ import annotations

from typing import Any

from ...core.errors import ConfigError
from ...data.tokenizers import Tokenizer, own_tokenizer
from ...models.hub import resolve
from ...rl.own.tasks import fresh_tokenizer
from ..job import Job
from ..settings.verbs import Start
from .common import begin, check_start, first_checkpoint
from .verbs import environments_of


def check(stage: Start, job: Job) -> None:
    """The folder is there, and is the recipe's model; a tokenizer by path can be made, and fits."""
    check_start(job, stage.name, stage.folder, text=_has_text(job))
    if stage.tokenizer is not None and (size := own_tokenizer(stage.tokenizer).vocab_size) > job.model.vocab:
        raise ConfigError(f"model.vocab = {job.model.vocab} is below the {size} tokens of {stage.tokenizer.path}")


def run(stage: Start, job: Job) -> dict[str, Any]:
    """Write the tokenizer, where tokens have a text, and the first checkpoint."""
    if not _has_text(job):
        folder = resolve(stage.folder) if stage.folder else None
        return {"steps": 0, "tokens": 0, "checkpoint": first_checkpoint(job, stage.name, folder)}

    def make() -> Tokenizer:
        if stage.tokenizer is not None:
            return own_tokenizer(stage.tokenizer)
        return fresh_tokenizer(environments_of(job.recipe), job.model.vocab)

    return begin(job, stage.name, stage.folder, make)


def _has_text(job: Job) -> bool:
    return getattr(job.recipe.env, "layout", None) is None  # or the tokens of its environment are codes
