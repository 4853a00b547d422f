"""What the agent stages share: the recipe's start with its tokenizer and tags, engines with or without adapters, an arm's budget."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from ...core.config import OptimizerConfig
from ...core.engine import Engine
from ...core.errors import ConfigError
from ...data.tokenizers import Tokenizer, load_tokenizer
from ...models.gpt import build_gpt
from ...models.lora import LoraConfig
from ...rl.agent_config import AgentSettings
from ...rl.worlds.tasks import Task, load_tasks
from ..job import Job
from ..recipe import AgentReinforce, AgentStart, AgentSupervised, Arm, Lora
from .common import final_checkpoint

TRAIN, HELD_OUT, TOKENIZER = "train", "held_out", "tokenizer"


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


def agent_engine(job: Job, optimizer: OptimizerConfig | None, init: str, lora: Lora | None = None) -> Engine:
    """An engine with the final weights of stage `init`; adapters of an earlier stage are merged first, new ones start at zero."""
    from ...core.checkpoint import CheckpointReader
    from ...models.hf import is_added
    from ...models.lora import merged

    adapters = LoraConfig(lora.rank, lora.alpha) if lora else None
    engine = Engine(build_gpt(job.model, lora=adapters), job.recipe.parallel, optimizer, job.recipe.precision, job.recipe.seed)
    earlier = next(s for s in job.recipe.stages if s.name == init)
    used = getattr(earlier, "lora", None)
    if used is None and adapters is None:
        engine.load(final_checkpoint(job, init), weights_only=True)
        return engine
    reader = CheckpointReader(final_checkpoint(job, init), verify=False)
    if used is None:
        engine.load_weights(lambda name: None if is_added(name) else reader.full(name))
        return engine
    config = LoraConfig(used.rank, used.alpha)

    def whole(name: str) -> Any:
        if is_added(name):
            return None
        base = name.removesuffix(".weight")
        parts = [(n, reader.full(n)) for n in (f"{base}.lora.a", f"{base}.lora.b") if n in reader.names()]
        return dict(merged([*parts, (name, reader.full(name))], config))[name]

    engine.load_weights(whole)
    return engine


def budget(job: Job, model: str) -> tuple[int, int]:
    """(actions in worlds, gradient tokens) that an arm took: its stage, those it started from, and the data they learnt from."""
    actions = tokens = 0
    name: str | None = model
    while name is not None:
        stage = next(s for s in job.recipe.stages if s.name == name)
        outcome = job.outcome(name)
        tokens += outcome.get("tokens", 0)
        if isinstance(stage, AgentReinforce):
            actions += outcome["actions"]
        if isinstance(stage, AgentSupervised):
            actions += job.outcome(stage.data)["actions"]
        name = getattr(stage, "init", None)
    return actions, tokens
