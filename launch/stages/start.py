"""Where models begin: weights and tokenizer of a Hugging Face folder, or fresh weights and the tokenizer of the
environment or of the user.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...data.tokenizers import TOKENIZER, load_tokenizer, own_tokenizer
from ...models.hf import import_hf, require_same, weight_source
from ...models.hub import resolve
from ...rl.own.tasks import fresh_tokenizer
from ..job import Job
from ..settings.verbs import Start
from .common import build_engine, first_checkpoint
from .verbs import environments_of, folder_tokenizer


def check(stage: Start, job: Job) -> None:
    """The folder is there, is the recipe's model, has its weights and, of text, no more tokens than the model; a
    tokenizer by path can be made, and fits.
    """
    if stage.tokenizer is not None and (size := own_tokenizer(stage.tokenizer).vocab_size) > job.model.vocab:
        raise ConfigError(f"model.vocab = {job.model.vocab} is below the {size} tokens of {stage.tokenizer.path}")
    if not stage.folder or not job.mesh.is_main:
        return
    try:
        folder = resolve(stage.folder)
    except ConfigError as error:
        raise ConfigError(
            f"stages: {stage.name}.folder: {error}; name another with --set stages.{stage.name}.folder=PATH"
        ) from error
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"stages: {stage.name}.folder = {stage.folder} holds no config.json; name a Hugging Face folder"
        )
    weight_source(folder, require_same(folder, job.model))
    if _has_text(job) and (size := folder_tokenizer(folder).vocab_size) > job.model.vocab:
        raise ConfigError(f"model.vocab = {job.model.vocab} is below the {size} of the tokenizer in {folder}")


def run(stage: Start, job: Job) -> dict[str, Any]:
    """Write the tokenizer, where tokens have a text, and the first checkpoint."""
    folder = resolve(stage.folder) if stage.folder else None
    vocabulary = _keep_tokenizer(stage, job, folder) if _has_text(job) else None
    engine = build_engine(job, None, loaded=folder is not None)
    if folder:
        import_hf(engine, folder)
    checkpoint = first_checkpoint(job, stage.name, engine)
    if vocabulary is None:
        return {"steps": 0, "tokens": 0, "checkpoint": checkpoint}
    return {"checkpoint": checkpoint, "vocabulary": vocabulary}


def _keep_tokenizer(stage: Start, job: Job, folder: Path | None) -> int:
    """Write the tokenizer that all stages read. How many tokens it has."""
    kept = job.stage_folder(stage.name) / TOKENIZER
    if job.mesh.is_main:
        job.run.guard()
        if folder:
            chosen = load_tokenizer(folder)
        elif stage.tokenizer is not None:
            chosen = own_tokenizer(stage.tokenizer)
        else:
            chosen = fresh_tokenizer(environments_of(job.recipe), job.model.vocab)
        if chosen.vocab_size > job.model.vocab:
            raise ConfigError(f"model.vocab = {job.model.vocab} is below the tokenizer's {chosen.vocab_size}")
        chosen.save(kept)
    job.mesh.barrier()
    return load_tokenizer(kept).vocab_size


def _has_text(job: Job) -> bool:
    return getattr(job.recipe.env, "layout", None) is None  # or the tokens of its environment are codes
