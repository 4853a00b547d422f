"""Questions that lie in shards already: they are looked at, counted and left where they are."""

from __future__ import annotations

from typing import Any

from ...core.errors import ConfigError
from ...data.shards import ShardSet
from ...rl.language import read_pair
from ..job import Job
from ..settings.language import LanguageData


def check(stage: LanguageData, job: Job) -> None:
    """Every part can be read."""
    if job.mesh.is_main:
        _rows(stage)


def run(stage: LanguageData, job: Job) -> dict[str, Any]:
    """Open every part, read its first question, and say how many there are."""
    outcome = {"pad_prompts_to": stage.pad_prompts_to, **_rows(stage)}
    job.mesh.barrier()
    return outcome


def _rows(stage: LanguageData) -> dict[str, int]:
    rows: dict[str, int] = {}
    for part in stage.parts:
        folder = getattr(stage, part)
        if not folder:
            continue
        shards = ShardSet(folder)
        if not len(shards):
            raise ConfigError(f"stages: {stage.name}.{part} = {folder} holds no sample")
        try:
            read_pair(shards[0])
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"stages: {stage.name}.{part} = {folder} holds no pairs of question and answer ({error!r})"
            ) from error
        rows[f"{part}_rows"] = len(shards)
    return rows
