"""Where models begin: weights and tokenizer of a Hugging Face folder, or fresh weights and the tokenizer of the environment."""

from __future__ import annotations

from typing import Any

from ...rl.own.tasks import fresh_tokenizer
from ..job import Job
from ..settings.verbs import Start
from .common import begin, check_start
from .verbs import environments_of


def check(stage: Start, job: Job) -> None:
    """The folder is there, and is the recipe's model."""
    check_start(job, stage.name, stage.folder)


def run(stage: Start, job: Job) -> dict[str, Any]:
    """Write the tokenizer and the first checkpoint."""
    return begin(job, stage.name, stage.folder, lambda: fresh_tokenizer(environments_of(job.recipe)))
