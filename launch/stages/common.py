"""What the training stages share: engines, and checkpoints that a stage resumes from."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from ...core.checkpoint import CheckpointReader, Stored, discard, drop_moments, has_moments, open_verified
from ...core.config import OptimizerConfig
from ...core.engine import Engine
from ...core.errors import ConfigError, StorageError
from ...core.run import changed_rows
from ...models.heads import ValueHead
from ...models.lora import LoraConfig, is_added, merged
from ...rl.rollout.config import Embedded, Validation, Vllm
from ...rl.rollout.open import open_sampler
from ...rl.rollout.sampler import Sampler
from ..job import Job, StopRequested
from ..settings.base import Lora, Retention, retention_of, sampler_of

T = TypeVar("T")
Evaluated = tuple[Sampler, Engine, Callable[[], None]]  # see `sampling`
STEP = re.compile(r"step-(\d{6})")


def first_checkpoint(job: Job, stage: str, engine: Engine) -> str:
    """Write the checkpoint of a stage that trains nothing; returns its path within the run."""
    where = step_folder(job.checkpoints(stage), 0)
    engine.save(where, {})
    return str(where.relative_to(job.run.path))


def build_engine(
    job: Job,
    optimizer: OptimizerConfig | None,
    init: str | None = None,
    lora: Lora | None = None,
    *,
    value_head: ValueHead = "none",
    loaded: bool = False,
) -> Engine:
    """A fresh engine, with the final weights of stage `init` if given, else for the caller to load. Adapters start
    without effect, and a value head is fresh.
    """
    from ...models.gpt import build_gpt  # imports Megatron, which takes seconds that a check need not spend

    adapters = LoraConfig(lora.rank, lora.alpha) if lora else None
    builder = build_gpt(job.model, value_head=value_head, lora=adapters, loaded=loaded or init is not None)
    engine = Engine(builder, job.recipe.parallel, optimizer, job.recipe.precision, job.recipe.seed)
    if init is not None:
        load_final(job, engine, init, plain=lora is None and value_head == "none")
    return engine


def load_final(job: Job, engine: Engine, init: str, plain: bool = False) -> None:
    """Load the final weights of a stage, its own adapters merged. The engine may have adapters or a value head that the
    stage lacks.
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
    """The verified checkpoint that a stage ended with. If it is damaged, its last steps must be repeated."""
    place = job.outcome(stage).get("checkpoint")
    if place is None:  # a stage of the user's own
        raise ConfigError(f"stages: '{stage}' left no model: its outcome has no 'checkpoint', a path within the run")
    try:
        return open_verified(job.run.path / place)
    except (StorageError, ConfigError) as error:
        raise StorageError(
            f"{error}. Stage '{stage}' ended with this checkpoint: restore it from a backup, or add --back-to {stage} "
            "to the same command, "
            "which repeats the stage from its newest whole checkpoint"
        ) from error


def split_cut(items: Sequence[T], validation: Validation, stage: str) -> tuple[Sequence[T], Sequence[T]]:
    """Split items into those a stage trains on and the last ones, which it validates on if it validates at all."""
    if not validation.every:
        return items, []
    if len(items) <= validation.prompts:
        raise ConfigError(
            f"stages: {stage}.rollouts.validation.prompts = {validation.prompts} leaves nothing of the {len(items)} "
            "to train on; lower it"
        )
    return items[: -validation.prompts], items[-validation.prompts :]


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def steps_in(folder: Path) -> list[int]:
    """The steps that have a checkpoint in a stage's folder, oldest first."""
    return sorted(int(m[1]) for p in folder.glob("step-*") if (m := STEP.fullmatch(p.name)))


class Checkpoints:
    """A stage's checkpoints: the newest complete one to resume from, and when to write the next."""

    def __init__(self, job: Job, stage: str, every: int, last: int, retention: Retention) -> None:
        self.job, self.stage, self.every, self.last, self.retention = job, stage, every, last, retention
        self.folder = job.checkpoints(stage)
        self._warned = False  # about a missing metric
        # engines whose files are being written, and what to call when they are complete
        self._under_way: tuple[list[Engine], Callable[[], None]] | None = None

    def resume(self, engine: Engine, beside: Sequence[str] = ()) -> tuple[int, dict[str, Any]]:
        """The step to resume from and what was saved with it; the metrics record is cut back to that step.

        If a checkpoint, or the one of another engine `beside` it, is damaged, a warning names it and the previous one
        is used.
        """
        self.job.mesh.barrier()  # other ranks may still read what is dropped
        found = [step for step in self.job.mesh.from_main(self._begin) if step]
        step, extra = 0, {}
        for step in reversed(found):
            try:
                if (step < self.last or beside) and not has_moments(step_folder(self.folder, step)):
                    raise ConfigError(no_moments(step_folder(self.folder, step), self.stage))
                for name in beside:
                    open_verified(step_folder(self.beside(name), step))
                extra = engine.load(step_folder(self.folder, step))
                if extra.get("of", [self.stage, step]) != [self.stage, step]:
                    raise StorageError(
                        f"{step_folder(self.folder, step)}: is the checkpoint of {extra['of']}, under another name"
                    )
                break
            except StorageError as error:
                self.job.warn(f"{error}. This checkpoint is skipped, and the steps after the previous one are repeated")
        else:
            if found:
                raise StorageError(
                    f"{self.folder}: none of its checkpoints is complete; restore one from a backup, or add --back-to "
                    f"{self.stage}:0 "
                    "to the same command, which repeats the stage from its beginning"
                )
        if spent := extra.get("spent"):
            self.job.started_at -= spent["time/stage_s"]
            self.job.saving_s += spent.get("time/saving_s", 0.0)
        if self.job.mesh.is_main:
            record, written = self.job.run.metrics, extra.get("metrics")
            if written and (found := record.digest(self.stage, step)) != written:
                self.job.warn(changed_rows(record.path, self.stage, found["rows"], written["rows"]))
            # later stages that have trained keep their rows: an extended run resumes an earlier stage after them
            later = self.job.later(self.stage)
            record.rewind(self.stage, step, tuple(name for name in later if not steps_in(self.job.checkpoints(name))))
        return step, extra

    def _begin(self) -> list[int]:
        drop_finished(self.job, self.stage)
        return steps_in(self.folder)

    def beside(self, name: str) -> Path:
        """The checkpoints folder of another engine of the stage, such as a critic."""
        return self.folder.with_name(f"{self.folder.name}-{name}")

    def save(
        self,
        engine: Engine,
        step: int,
        extra: dict[str, Any],
        others: Mapping[str, Engine] = MappingProxyType({}),
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Save if due, or if a signal asked to stop; in that case StopRequested ends the stage. Called at the end of
        every step.

        Files are written while training continues, one checkpoint at a time. It is published at the end of the first
        step that finds all ranks done, where a write error is also raised. The next save waits for it; the last save,
        and one before a stop, wait for their own files. `then` is called on every rank once it is published.
        """
        engines = [*others.values(), engine]
        stop, written = self.job.end_of_step(not any(one.writing for one in engines))
        due = stop or step % self.every == 0 or step == self.last
        with self.job.paused_for_saving():
            if written or due:
                self._finish_saves()
            if not due:
                return
            if self.job.mesh.is_main:
                self.job.run.guard()
            for name, other in others.items():
                other.save(step_folder(self.beside(name), step), {}, wait=False)
            # `extra` is written by the main rank
            metrics = self.job.run.metrics.digest(self.stage, step) if self.job.mesh.is_main else None
            kept = {**extra, "of": [self.stage, step], "metrics": metrics, "spent": self.job.spent()}
            engine.save(step_folder(self.folder, step), kept, wait=False)
            self._under_way = engines, partial(self._published, step, tuple(others), then)
            if stop or step == self.last:
                self._finish_saves()
        if stop and step < self.last:
            raise StopRequested

    def _finish_saves(self) -> None:
        """Wait for pending files and publish them. Other engines' checkpoints come first, because the stage's own one
        marks the whole as complete.
        """
        if self._under_way is None:
            return
        (engines, then), self._under_way = self._under_way, None
        if self.job.mesh.is_main:
            self.job.run.guard()
        for engine in engines:
            engine.finish_save()
        then()

    def _published(self, step: int, others: Sequence[str], then: Callable[[], None]) -> None:
        if self.job.mesh.is_main:
            kept = self._kept(step)
            for folder in (self.folder, *map(self.beside, others)):
                self._prune(folder, step, kept)
        then()

    def _kept(self, newest: int) -> set[int]:
        """The steps whose checkpoints are kept: the one just published, some before it, and the best."""
        steps = [step for step in steps_in(self.folder) if step <= newest]
        best = self.best()
        return {*steps[-self.retention.keep :], *([] if best is None else [best[0]])}

    def best(self) -> tuple[int, float] | None:
        """(step, value) of the checkpoint with the best value of the metric. A checkpoint's value is the newest one
        measured no later than its step.
        """
        name = self.retention.best
        if name is None:
            return None
        rows = [row for row in self.job.run.metrics.rows() if row["stage"] == self.stage]
        seen = {measured_after(row, name): float(row[name]) for row in rows if isinstance(row.get(name), int | float)}
        if rows and not seen and not self._warned:
            known = ", ".join(key for key in rows[-1] if key not in ("stage", "step"))
            self.job.warn(
                f"stages: {self.stage}.checkpoints.best: no row of the record has '{name}' yet, and no checkpoint is "
                f"the best; there are {known}"
            )
            self._warned = True
        sign = -1.0 if self.retention.lowest else 1.0
        valued = [
            (sign * seen[max(looks)], step)
            for step in steps_in(self.folder)
            if (looks := [look for look in seen if look <= step])
        ]
        return (max(valued)[1], sign * max(valued)[0]) if valued else None

    def _prune(self, folder: Path, newest: int, kept: set[int]) -> None:
        """Delete checkpoints that are not kept, and remains of killed saves."""
        old = [step_folder(folder, step) for step in steps_in(folder) if step <= newest and step not in kept]
        for path in (*old, *folder.glob(".saving-*"), *folder.glob(".deleting-*")):
            discard(path)

    def outcome(self) -> dict[str, Any]:
        """The paths of the stage's last and best checkpoint within the run, for its outcome."""
        outcome: dict[str, Any] = {"checkpoint": self._place(self.last)}
        if self.job.mesh.is_main and (best := self.best()) is not None:
            outcome["best"] = {"checkpoint": self._place(best[0]), "step": best[0], "value": best[1]}
        return outcome

    def _place(self, step: int) -> str:
        return str(step_folder(self.folder, step).relative_to(self.job.run.path))


def measured_after(row: Mapping[str, Any], name: str) -> int:
    """After how many steps a recorded value was measured. Validation on training tasks is played before the step in
    whose row it is recorded.
    """
    return int(row["validation/steps" if name.startswith("validation/") and "validation/steps" in row else "step"])


def drop_finished(job: Job, stage: str) -> None:
    """Before a stage trains: reduce finished stages to the weights of their last and best checkpoint, without
    critics.
    """
    earlier = takewhile(lambda other: other.name != stage, job.recipe.stages)
    for other in earlier:
        retention, outcome = retention_of(other), job.run.outcome(other.name)
        if retention is None or retention.finished == "whole" or outcome is None or "checkpoint" not in outcome:
            continue
        job.run.guard()
        folder = job.checkpoints(other.name)
        stay = {Path(held["checkpoint"]).name for held in (outcome, outcome.get("best")) if held}
        for path in (step_folder(folder, step) for step in steps_in(folder)):
            if path.name not in stay:
                discard(path)
                continue
            with suppress(StorageError):  # a damaged one: the error is raised where it is needed
                drop_moments(path)
        shutil.rmtree(folder.with_name(f"{folder.name}-critic"), ignore_errors=True)


def no_moments(path: Path, stage: str) -> str:
    """Why training cannot continue from a checkpoint without the optimizer's state, and what to do."""
    return (
        f"{path}: holds weights alone; the optimizer's state of a finished stage is dropped when a later one trains. "
        f"--back-to {stage}:0 trains the stage again; a run of stages.{stage}.checkpoints.finished = whole keeps the "
        "state"
    )


@contextmanager
def sampling(job: Job, stage: Any) -> Iterator[Callable[[str], AbstractContextManager[Evaluated]]]:
    """One sampler for all models of an evaluation, so that servers start once; closed with the block. Every rank opens
    it; leaders sample.

    It yields a context manager that loads a stage's final weights into the sampler and its engine, and gives the device
    back to the engine at its end. That yields both, and a function that sends the weights again if servers lost them.
    """
    settings = sampler_of(stage, job.recipe.stages)
    if settings is None:
        settings = Embedded()
    elif isinstance(settings, Vllm):
        settings = replace(settings, adapters_only=False)  # evaluations send whole models
    engine = build_engine(job, None, loaded=True)
    opened = open_sampler(settings, engine, job.model, job.stage_folder(stage.name) / "sampler", mesh=job.mesh)

    @contextmanager
    def of(model: str) -> Iterator[Evaluated]:
        load_final(job, engine, model, plain=True)
        engine.steps += 1  # a new version: caches of the previous model must not be used

        def publish() -> None:
            if opened.publish is not None:
                opened.publish(engine.steps)

        publish()
        yield opened.sampler, engine, publish
        if opened.rest is not None:
            opened.rest()

    try:
        yield of
    finally:
        opened.close()
