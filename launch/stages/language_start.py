"""Where language world models begin: weights, tokenizer and chat template of a Hugging Face model."""

from __future__ import annotations

from typing import Any

from ..job import Job
from ..settings.language import LanguageStart
from .common import begin, check_start


def check(stage: LanguageStart, job: Job) -> None:
    """The folder is there."""
    check_start(job, stage.name, stage.folder)


def run(stage: LanguageStart, job: Job) -> dict[str, Any]:
    """Write tokenizer and first checkpoint."""
    return begin(job, stage.name, stage.folder)
