"""Questions that lie in shards already: they are looked at, counted and left where they are."""

from __future__ import annotations

from typing import Any

from ...core.errors import ConfigError
from ...data.shards import ShardSet
from ...rl.language import read_pair
from ..job import Job
from ..settings.language import LanguageData
from .language import Questions


def run(stage: LanguageData, job: Job) -> dict[str, Any]:
    """Open every part, read its first question, and say how many there are."""
    questions, outcome = Questions(job, stage.name), {"pad_prompts_to": stage.pad_prompts_to}
    for part in stage.parts:
        folder = questions.folder(part)
        if folder is None:
            continue
        shards = ShardSet(folder)
        if not len(shards):
            raise ConfigError(f"stages: {stage.name}.{part} = {folder} holds no sample")
        try:
            read_pair(shards[0])
        except (KeyError, TypeError) as error:
            raise ConfigError(f"stages: {stage.name}.{part} = {folder} holds no pairs of question and answer ({error!r})") from error
        outcome[f"{part}_rows"] = len(shards)
    job.mesh.barrier()
    return outcome
