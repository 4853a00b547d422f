"""What the training stages share: engines, and checkpoints that a stage resumes from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from ...core.checkpoint import CheckpointReader, Stored, open_verified
from ...core.config import OptimizerConfig
from ...core.engine import Engine
from ...core.errors import ConfigError, StorageError
from ...core.run import changed_rows
from ...data.tokenizers import TOKENIZER, Tokenizer, load_tokenizer
from ...models.gpt import build_gpt
from ...models.hf import import_hf, require_same, weight_source
from ...models.hub import resolve
from ...models.lora import LoraConfig, is_added, merged
from ...rl.rollout.config import Embedded, Validation, Vllm
from ...rl.rollout.open import open_sampler
from ...rl.rollout.sampler import Sampler
from ..job import Job, StopRequested
from ..settings.base import Lora, sampler_of

T = TypeVar("T")
STEP = re.compile(r"step-(\d{6})")


def begin(job: Job, stage: str, named: str | None, make: Callable[[], Tokenizer] | None = None) -> dict[str, Any]:
    """Where a recipe's models start: weights and tokenizer of a Hugging Face model, or fresh weights and the tokenizer
    that `make` gives.

    Writes the tokenizer and the first checkpoint; the stage's outcome names it.
    """
    folder = resolve(named) if named else None
    if folder and not (folder / "config.json").is_file():
        raise ConfigError(f"stages: {stage}.folder = {named} holds no config.json; name a Hugging Face folder")
    tokenizer = job.stage_folder(stage) / TOKENIZER
    if job.mesh.is_main:
        job.run.guard()
        assert folder or make
        chosen = load_tokenizer(folder) if folder else make()  # type: ignore[misc]
        if chosen.vocab_size > job.model.vocab:
            raise ConfigError(f"model.vocab = {job.model.vocab} is below the tokenizer's {chosen.vocab_size}")
        chosen.save(tokenizer)
    job.mesh.barrier()
    return {"checkpoint": first_checkpoint(job, stage, folder), "vocabulary": load_tokenizer(tokenizer).vocab_size}


def check_start(job: Job, stage: str, named: str | None, text: bool = True) -> None:
    """Refuse a start folder that is not there, is not the recipe's model, lacks weights, or, of text, has more
    tokens than the model.
    """
    if not named or not job.mesh.is_main:
        return
    try:
        folder = resolve(named)
    except ConfigError as error:
        raise ConfigError(
            f"stages: {stage}.folder: {error}; name another with --set stages.{stage}.folder=PATH"
        ) from error
    if not (folder / "config.json").is_file():
        raise ConfigError(f"stages: {stage}.folder = {named} holds no config.json; name a Hugging Face folder")
    weight_source(folder, require_same(folder, job.model))
    if text and (size := load_tokenizer(folder).vocab_size) > job.model.vocab:
        raise ConfigError(f"model.vocab = {job.model.vocab} is below the {size} of the tokenizer in {folder}")


def first_checkpoint(job: Job, stage: str, folder: Path | None) -> str:
    """A stage's checkpoint that nothing was trained for: a Hugging Face folder's weights, or fresh ones. Its path
    within the run.
    """
    engine = build_engine(job, None, loaded=folder is not None)
    if folder:
        import_hf(engine, folder)
    where = step_folder(job.checkpoints(stage), 0)
    engine.save(where, {})
    return str(where.relative_to(job.run.path))


def build_engine(
    job: Job,
    optimizer: OptimizerConfig | None,
    init: str | None = None,
    lora: Lora | None = None,
    *,
    loaded: bool = False,
) -> Engine:
    """A fresh engine, with the final weights of stage `init` where one is named, or those that the caller loads;
    adapters start as if they were not there.
    """
    adapters = LoraConfig(lora.rank, lora.alpha) if lora else None
    builder = build_gpt(job.model, lora=adapters, loaded=loaded or init is not None)
    engine = Engine(builder, job.recipe.parallel, optimizer, job.recipe.precision, job.recipe.seed)
    if init is not None:
        load_final(job, engine, init, plain=lora is None)
    return engine


def load_final(job: Job, engine: Engine, init: str, plain: bool = False) -> None:
    """The final weights of a stage into an engine that may have adapters or a value head beyond them; the stage's
    own adapters merged.
    """
    trained: Lora | None = getattr(next(s for s in job.recipe.stages if s.name == init), "lora", None)
    reader = open_final(job, init)
    if plain and trained is None:
        engine.load_weights(lambda name: Stored(reader, name))
        return
    known = set(reader.names())

    def weight(name: str) -> torch.Tensor | Stored | None:
        if is_added(name):
            return None
        parts = [f"{name.removesuffix('weight')}lora.{part}" for part in "ab"]
        if trained is None or parts[0] not in known:
            return Stored(reader, name)
        stream = [(part, reader.full(part)) for part in parts] + [(name, reader.full(name))]
        return dict(merged(stream, job.model, LoraConfig(trained.rank, trained.alpha)))[name]

    engine.load_weights(weight)


def open_final(job: Job, stage: str) -> CheckpointReader:
    """The verified checkpoint that a stage ended with. Nothing takes the place of a damaged one but the same steps
    again.
    """
    try:
        return open_verified(final_checkpoint(job, stage))
    except (StorageError, ConfigError) as error:
        raise StorageError(
            f"{error}. Stage '{stage}' ended with this checkpoint: restore it from a backup, or add --back-to {stage} "
            "to the same command, "
            "which repeats the stage from its newest whole checkpoint"
        ) from error


def build_critic(job: Job, optimizer: OptimizerConfig, init: str) -> Engine:
    """A critic: the stage's starting weights with a fresh value head."""
    builder = build_gpt(job.model, value_head="scalar", loaded=True)
    engine = Engine(builder, job.recipe.parallel, optimizer, job.recipe.precision, job.recipe.seed)
    load_final(job, engine, init)
    return engine


def split_cut(items: Sequence[T], validation: Validation, stage: str) -> tuple[Sequence[T], Sequence[T]]:
    """What a stage trains on, and the cut it validates on: the last so many items. Without validation everything is
    trained on.
    """
    if not validation.every:
        return items, []
    if len(items) <= validation.prompts:
        raise ConfigError(
            f"stages: {stage}.rollouts.validation.prompts = {validation.prompts} leaves nothing of the {len(items)} "
            "to train on; lower it"
        )
    return items[: -validation.prompts], items[-validation.prompts :]


def final_checkpoint(job: Job, stage: str) -> Path:
    """The checkpoint a finished training stage ended with."""
    return job.run.path / job.outcome(stage)["checkpoint"]


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def steps_in(folder: Path) -> list[int]:
    """The steps that have a checkpoint in a stage's folder, oldest first."""
    return sorted(int(m[1]) for p in folder.glob("step-*") if (m := STEP.fullmatch(p.name)))


class Checkpoints:
    """A stage's checkpoints: the newest whole one to resume from, and when to write the next."""

    def __init__(self, job: Job, stage: str, every: int, last: int) -> None:
        self.job, self.stage, self.every, self.last = job, stage, every, last
        self.folder = job.checkpoints(stage)

    def resume(self, engine: Engine, beside: Sequence[str] = ()) -> tuple[int, dict[str, Any]]:
        """The step to go on from and what was saved with it; the metrics record is cut back to that step.

        A damaged checkpoint, or one with a damaged one `beside` it, is named, and the one before it taken.
        """
        found = [step for step in self.job.mesh.from_main(lambda: steps_in(self.folder)) if step]
        step, extra = 0, {}
        for step in reversed(found):
            try:
                for name in beside:
                    open_verified(step_folder(self.beside(name), step))
                extra = engine.load(step_folder(self.folder, step))
                if extra.get("of", [self.stage, step]) != [self.stage, step]:
                    raise StorageError(
                        f"{step_folder(self.folder, step)}: is the checkpoint of {extra['of']}, under another name"
                    )
                break
            except StorageError as error:
                self.job.warn(
                    f"{error}. This checkpoint is passed over, and the steps after the one before it are repeated"
                )
        else:
            if found:
                raise StorageError(
                    f"{self.folder}: none of its checkpoints is whole; restore one from a backup, or add --back-to "
                    f"{self.stage}:0 "
                    "to the same command, which repeats the stage from its beginning"
                )
        if self.job.mesh.is_main:
            record, written = self.job.run.metrics, extra.get("metrics")
            if written and (found := record.digest(self.stage, step)) != written:
                self.job.warn(changed_rows(record.path, self.stage, found["rows"], written["rows"]))
            # one that has trained keeps its rows: an extended run resumes an earlier stage after it
            later = self.job.later(self.stage)
            record.rewind(self.stage, step, tuple(name for name in later if not steps_in(self.job.checkpoints(name))))
        return step, extra

    def beside(self, name: str) -> Path:
        """Where the checkpoints of another engine of the stage lie, such as a critic."""
        return self.folder.with_name(f"{self.folder.name}-{name}")

    def save(
        self, engine: Engine, step: int, extra: dict[str, Any], others: Mapping[str, Engine] = MappingProxyType({})
    ) -> None:
        """Save when it is time, or when a signal asked to stop; then StopRequested ends the stage. `others` are
        saved first.
        """
        stop = self.job.end_of_step()
        if not (stop or step % self.every == 0 or step == self.last):
            return
        if self.job.mesh.is_main:
            self.job.run.guard()
        for name, other in others.items():
            other.save(step_folder(self.beside(name), step), {})
        # extra is written by the main rank
        metrics = self.job.run.metrics.digest(self.stage, step) if self.job.mesh.is_main else None
        engine.save(step_folder(self.folder, step), {**extra, "of": [self.stage, step], "metrics": metrics})
        if self.job.mesh.is_main:
            for folder in (self.folder, *map(self.beside, others)):
                self._prune(folder, step)
        if stop and step < self.last:
            raise StopRequested

    def _prune(self, folder: Path, newest: int) -> None:
        """Keep the newest two: the one just proven whole, and the one before it. What killed saves left behind goes
        too.
        """
        import shutil

        old = [step_folder(folder, step) for step in steps_in(folder) if step <= newest][:-2]
        for path in (*old, *folder.glob(".saving-*"), *folder.glob(".deleting-*")):
            shutil.rmtree(path, ignore_errors=True)

    def final(self) -> str:
        """Where the stage's last checkpoint lies, relative to the run directory."""
        return str(step_folder(self.folder, self.last).relative_to(self.job.run.path))


@contextmanager
def sampling(job: Job, stage: Any) -> Iterator[Callable[[str], AbstractContextManager[tuple[Sampler, Engine]]]]:
    """One sampler for all models of an evaluation, ended with the block: servers start once. Every rank opens it;
    leaders sample.

    What it yields brings a stage's final weights into the sampler and its engine, which has the device again when that
    block ends.
    """
    settings = sampler_of(stage, job.recipe.stages)
    if settings is None:
        settings = Embedded()
    elif isinstance(settings, Vllm):
        settings = replace(settings, adapters_only=False)  # whole models are sent
    engine = build_engine(job, None, loaded=True)
    opened = open_sampler(settings, engine, job.model, job.stage_folder(stage.name) / "sampler", mesh=job.mesh)

    @contextmanager
    def of(model: str) -> Iterator[tuple[Sampler, Engine]]:
        load_final(job, engine, model, plain=True)
        engine.steps += 1  # a version of its own: nothing that was computed for the model before is used
        if opened.publish is not None:
            opened.publish(engine.steps)
        yield opened.sampler, engine
        if opened.rest is not None:
            opened.rest()

    try:
        yield of
    finally:
        opened.close()
