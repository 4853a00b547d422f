"""What the stages sft, rl and eval share: the environment of a stage, opened, and the tokenizer of the recipe's start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from ...core.errors import ConfigError
from ...data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from ...models.hub import resolve
from ...rl.own.tasks import open_tasks
from ...rl.tasks import Tasks
from ..job import Job
from ..settings.verbs import Reinforce, Score, Start, Tune
from .common import TOKENIZER


@lru_cache(maxsize=2)
def _load(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def start_of(job: Job) -> Start:
    """The recipe's start."""
    starts = [stage for stage in job.recipe.stages if isinstance(stage, Start)]
    if len(starts) != 1:
        raise ConfigError(f"stages: the kinds sft, rl and eval need exactly one stage of kind start, not {len(starts)}")
    return starts[0]


def tokenizer_of(job: Job) -> Tokenizer:
    """The tokenizer that the start left, or will leave."""
    start = start_of(job)
    kept = job.stage_folder(start.name) / TOKENIZER
    if job.run.outcome(start.name) is not None:
        return _load(kept)
    return load_tokenizer(resolve(start.folder)) if start.folder else ByteTokenizer()


@contextmanager
def environment(stage: Tune | Reinforce | Score, job: Job) -> Iterator[Tasks]:
    """The stage's environment, or the recipe's; its process ends with the block."""
    settings = stage.env or job.recipe.env
    if settings is None:
        raise ConfigError(f"env: stage '{stage.name}' needs an environment; give the recipe a section env, or the stage one")
    with open_tasks(settings, tokenizer_of(job), job.model.max_positions) as tasks:
        yield tasks
