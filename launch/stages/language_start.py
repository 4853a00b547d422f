"""Where language world models begin: weights, tokenizer and chat template of a Hugging Face model."""

from __future__ import annotations

from typing import Any

from ..job import Job
from ..settings.language import LanguageStart
from .common import begin


def run(stage: LanguageStart, job: Job) -> dict[str, Any]:
    """Write tokenizer and first checkpoint."""
    return begin(job, stage.name, stage.folder)
