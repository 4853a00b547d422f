"""A stage of the user's own, by path."""

from __future__ import annotations

import json
from typing import Any

from ...core.by_path import describe_error
from ...core.errors import ConfigError, TerrellaError
from ..job import Job, StopRequested
from ..settings.verbs import OwnStage


def check(stage: OwnStage, job: Job) -> None:
    """Before the run starts: the file loads, and is the one that the run was started with."""
    stage.load()


def run(stage: OwnStage, job: Job) -> dict[str, Any]:
    """Call the function on every rank; what it gives is the stage's outcome."""
    try:
        outcome = stage.load()(stage, job)
    except (TerrellaError, StopRequested):
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"stages: {stage.name}: {stage.path} failed: {describe_error(error, stage.path)}") from error
    if outcome is not None and not isinstance(outcome, dict):
        raise ConfigError(
            f"stages: {stage.name}: {stage.path} gave {type(outcome).__name__}; a dict of what it made, or None, is "
            "needed"
        )
    try:
        json.dumps(outcome)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"stages: {stage.name}: {stage.path} gave what JSON cannot hold: {error}") from error
    return outcome or {}
