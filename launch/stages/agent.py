"""What the agent stages share: the recipe's start with its tokenizer and tags, an arm's settings and budget."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...data.tokenizers import Tokenizer, load_tokenizer
from ...rl.agents.config import AgentSettings
from ...rl.worlds.tasks import Task, load_tasks
from ..job import Job
from ..settings.agent import AgentReinforce, AgentStart, AgentSupervised, Arm
from .common import TOKENIZER

TRAIN, HELD_OUT = "train", "held_out"


def start_of(job: Job) -> AgentStart:
    """The recipe's start."""
    found = [stage for stage in job.recipe.stages if isinstance(stage, AgentStart)]
    if len(found) != 1:
        raise ConfigError(f"stages: agent stages need exactly one stage of kind agent-start, not {len(found)}")
    return found[0]


@lru_cache(maxsize=2)
def _load(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def tokenizer_of(job: Job) -> Tokenizer:
    """The tokenizer that the start left."""
    return _load(job.stage_folder(start_of(job).name) / TOKENIZER)


def tasks_of(job: Job, tags: Any) -> dict[str, Task]:
    """The named tags, refused by name where there is none such."""
    known = load_tasks(*start_of(job).tag_files)
    for tag in tags:
        if tag not in known:
            raise ConfigError(f"tags: '{tag}' is neither shipped nor in tag_files; there are {', '.join(known)}")
    return {tag: known[tag] for tag in tags}


def weights_of(job: Job, tags: dict[str, float]) -> dict[str, float]:
    """The stage's tags with their weights, or the start's, equally."""
    return tags or dict.fromkeys(start_of(job).tags, 1.0)


def agent_of(job: Job, arm: Arm) -> AgentSettings:
    """How an arm's model meets its world: as it was trained, unless the arm says otherwise."""
    stage = next(s for s in job.recipe.stages if s.name == arm.model)
    if isinstance(stage, AgentSupervised):
        stage = next(s for s in job.recipe.stages if s.name == stage.data)
    found = arm.agent or getattr(stage, "agent", None)
    if found is None:
        raise ConfigError(f"arms: '{arm.name}' evaluates stage '{arm.model}', which has no agent settings; give the arm `agent`")
    return found


def budget(job: Job, model: str) -> tuple[int, int]:
    """(actions in worlds, gradient tokens) that an arm took: its stage, those it started from, and the data they learnt from."""
    actions = tokens = 0
    played: set[str] = set()
    name: str | None = model
    while name is not None:
        stage = next(s for s in job.recipe.stages if s.name == name)
        outcome = job.outcome(name)
        tokens += outcome.get("tokens", 0)
        if isinstance(stage, AgentReinforce):
            actions += outcome["actions"]
        if isinstance(stage, AgentSupervised) and stage.data not in played:
            actions += job.outcome(stage.data)["actions"]
            played.add(stage.data)
        name = getattr(stage, "init", None)
    return actions, tokens
