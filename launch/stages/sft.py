"""Supervised fine-tuning on an environment's demonstrations, or on what a collect stage left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from ...core.config import OptimizerConfig
from ...core.errors import ConfigError
from ...core.mesh import Mesh
from ...core.rng import fold, shuffled
from ...data.balance import dealt, spread
from ...data.packing import TrainSequence, pack, role_weight
from ...data.shards import ShardSet
from ...data.trajectory import Role, TokenSequence
from ...kernels.policy import PolicySettings
from ...rl.objective import logprob_score, make_loss
from ...rl.tasks import Tasks
from ..job import Job
from ..settings.base import OnPolicy
from ..settings.verbs import OwnStage, Tune
from .collect import HELD_OUT, TRAIN
from .common import build_engine
from .fit import Portion, fit
from .verbs import environment, require_tasks, tokenizer_in

KEPT = 1 << 24  # tokens of lessons kept in memory for the epochs to come
LEARNT = (Role.ACTION, Role.STATE)
HELD_OUT_MOST = 512  # held-out lessons that are scored at the end


class Demonstrations:
    """The demonstrations of training tasks as token sequences, each made once."""

    def __init__(self, tasks: Tasks, where: str) -> None:
        self.tasks, self.where, self.train = tasks, where, tasks.imitated()
        self.order, self.pad_id = tasks.lesson_order, tasks.pad_id
        self._kept: dict[int, list[TokenSequence]] = {}
        self._tokens = 0  # tokens of those kept

    def __len__(self) -> int:
        return len(self.train)

    def at(self, places: Sequence[int]) -> list[TokenSequence]:
        """The sequences of these tasks."""
        if self._tokens > KEPT:
            self._kept.clear()
            self._tokens = 0
        missing = [i for i in dict.fromkeys(places) if i not in self._kept]
        made = self.tasks.lessons([self.train[i] for i in missing], self.where)
        self._kept |= dict(zip(missing, made, strict=True))
        self._tokens += sum(len(sequence.ids) for sequences in made for sequence in sequences)
        return [sequence for i in places for sequence in self._kept[i]]

    def tokens(self, places: Sequence[int]) -> int:
        """The number of tokens to learn in these tasks."""
        each = self.tasks.lesson_tokens
        return answer_tokens(self.at(places)) if each is None else each * len(places)


class Collected:
    """The lessons of a collect stage, all in memory: they are small compared to a model."""

    def __init__(self, job: Job, data: str, part: str) -> None:
        collected = next(stage for stage in job.recipe.stages if stage.name == data)
        env: Any = getattr(collected, "env", None) or job.recipe.env
        self.key: int | None = getattr(env, "lesson_key", None)
        folder = job.stage_folder(data) / part
        shards = ShardSet(folder, fields=["tokens.npy", "roles.npy"]) if any(folder.glob("*.tar")) else ()
        self.read = [_sequence(shards[i]) for i in range(len(shards))]
        tokenizer = tokenizer_in(env, job)
        assert tokenizer is not None, "codes are collected by no stage, and this one has finished"
        self.pad_id = tokenizer.pad_id

    def __len__(self) -> int:
        return len(self.read)

    def order(self, seed: int) -> Callable[[int], int]:
        key = seed if self.key is None else fold(seed, self.key)
        return lambda place: shuffled(len(self.read), key, place)

    def at(self, places: Sequence[int]) -> list[TokenSequence]:
        return [self.read[i] for i in places]

    def tokens(self, places: Sequence[int]) -> int:
        return answer_tokens(self.at(places))


Lessons = Demonstrations | Collected


def _sequence(sample: dict[str, Any]) -> TokenSequence:
    """Cut a lesson after its last learnt token: what follows, such as the page after an action, has no effect."""
    roles = sample["roles.npy"]
    end = int(max(np.flatnonzero(np.isin(roles, LEARNT)), default=len(roles) - 1)) + 1
    return TokenSequence(tuple(sample["tokens.npy"][:end].tolist()), tuple(map(Role, roles[:end].tolist())))


@contextmanager
def lessons_of(stage: Tune, job: Job) -> Iterator[Lessons]:
    """The lessons that the stage imitates."""
    if stage.data is None:
        with environment(stage, job) as tasks:
            yield Demonstrations(tasks, f"stages: {stage.name}")
        return
    collected = Collected(job, stage.data, TRAIN)
    if not len(collected):
        raise ConfigError(
            f"stages: {stage.name}.data: stage '{stage.data}' left nothing to imitate: no valid episode of it was a "
            "lesson, by its "
            "least_reward or by what its env asks of an answer, such as only_tagged; loosen them, or warm its model up"
        )
    yield collected


def answer_tokens(lessons: Sequence[TokenSequence]) -> int:
    """The number of tokens to learn."""
    return sum(lesson.roles.count(role) for lesson in lessons for role in LEARNT)


def prompt_tokens(lesson: TokenSequence, pad_id: int) -> np.ndarray:
    """Mask of prompt tokens that follow another prompt token: neither the padding in front nor the first token."""
    ids, read = np.asarray(lesson.ids), np.asarray(lesson.roles) == Role.PROMPT
    read[: int(np.argmax(ids != pad_id)) + 1] = False
    return read


def weighted(
    lesson: TokenSequence, total: int, prompt_weight: float, pad_id: int, prompt_loss: float = 0.0
) -> TrainSequence:
    """A lesson whose answer tokens weigh 1 / total of the step, and its prompt tokens `prompt_weight` times that, or
    `prompt_loss` each. Padding is not learnt."""
    weight = sum(
        (role_weight(lesson, role, 1.0 / total) for role in LEARNT[1:]), role_weight(lesson, LEARNT[0], 1.0 / total)
    )
    if prompt_weight:
        weight = weight + role_weight(lesson, Role.PROMPT, prompt_weight / total) * (np.asarray(lesson.ids) != pad_id)
    if prompt_loss:
        weight = weight + prompt_tokens(lesson, pad_id) * np.float32(prompt_loss)
    return TrainSequence.of(lesson, ce=weight.astype(np.float32))


def check(stage: Tune, job: Job) -> None:
    """Before the run starts: the stage whose tokens are matched trains on some; the environment opens, has training
    tasks, and they can be imitated.
    """
    matched = next((other for other in job.recipe.stages if other.name == stage.match_tokens_of), None)
    if matched is not None and not isinstance(matched, Tune | OnPolicy | OwnStage):
        raise ConfigError(
            f"stages: {stage.name}.match_tokens_of: '{matched.name}' of kind {matched.kind} counts no gradient tokens; "
            "name a stage of kind sft or rl"
        )
    if job.mesh.is_main and stage.data is None:
        with environment(stage, job) as tasks:
            require_tasks(tasks, "train", stage.name)
            tasks.require_lessons(f"stages: {stage.name}")


def run(stage: Tune, job: Job) -> dict[str, Any]:
    """Train to the last step; the outcome counts answer tokens. Leaders read the lessons and send them to their
    peers.
    """
    with lessons_of(stage, job) as lessons:
        order = lessons.order(job.recipe.seed)
        engine = build_engine(job, stage.optimizer, stage.init, stage.lora)

        def places_of(step: int) -> list[int]:
            first = step * stage.sequences_per_step
            return [order(place) for place in range(first, first + stage.sequences_per_step)]

        def portion(step: int) -> Portion:
            """This rank's microbatches of a step, and the answer tokens of all ranks."""
            chosen = job.mesh.from_leader(lambda: lessons.at(dealt(places_of(step), job.mesh)))
            total = sum(job.mesh.gather(answer_tokens(chosen)))
            read = stage.prompt_loss
            if read:  # weight of every prompt token
                read /= max(
                    sum(job.mesh.gather(int(sum(prompt_tokens(lesson, lessons.pad_id).sum() for lesson in chosen)))), 1
                )
            rows = [weighted(lesson, max(total, 1), stage.prompt_weight, lessons.pad_id, read) for lesson in chosen]
            return spread(rows, stage.microbatch_tokens, job.mesh, job.model.hidden).batches, {"tokens": total}

        steps = stage.steps or 0
        if stage.epochs is not None:
            steps = max(1, round(stage.epochs * len(lessons) / stage.sequences_per_step))
        elif stage.match_tokens_of is not None:
            wanted = job.outcome(stage.match_tokens_of).get("tokens")
            if not isinstance(wanted, int):
                raise ConfigError(
                    f"stages: {stage.name}.match_tokens_of: the outcome of '{stage.match_tokens_of}' has no whole "
                    "number of tokens"
                )
            steps = matched_steps(lessons, places_of, wanted, job.mesh)
        if stage.stretch_schedule:
            engine.optimizer_config = stretched(stage.optimizer, steps)
        outcome = fit(job, stage.name, engine, stage, steps, portion, make_loss(PolicySettings()), _described)
        if stage.data is None:
            return outcome
        return {**outcome, "turns": len(lessons), "held_out_loss": held_out_loss(stage, job, engine)}


def _described(sums: dict[str, float]) -> dict[str, float]:
    return {"loss": sums["loss"], "entropy": sums["entropy"] / max(1.0, sums["tokens"])}


def stretched(optimizer: OptimizerConfig, steps: int) -> OptimizerConfig:
    """The same schedule, warm-up included, stretched to another number of steps: how many turns of self-play survive
    the filter, and so the length of an epoch, is not known in advance.
    """
    if optimizer.schedule == "constant":
        return optimizer
    warmup = round(steps * optimizer.warmup_steps / optimizer.total_steps)
    return replace(optimizer, warmup_steps=min(warmup, steps - 1), total_steps=steps)


def matched_steps(lessons: Lessons, places_of: Callable[[int], list[int]], wanted: int, mesh: Mesh) -> int:
    """Steps until the stream has yielded at least this many answer tokens. Collective: every rank counts its part."""
    seen = 0
    for step in count():
        if seen >= wanted:
            return max(step, 1)
        part = dealt(places_of(step), mesh)
        seen += sum(mesh.gather(mesh.from_leader(lambda part=part: lessons.tokens(part))))
    raise AssertionError("unreachable")


def held_out_loss(stage: Tune, job: Job, engine: Any) -> float | None:
    """Mean cross-entropy of held-out lessons, None if there are none."""
    chosen = Collected(job, str(stage.data), HELD_OUT).read[:HELD_OUT_MOST]
    if not chosen:
        return None
    rows = [weighted(lesson, max(answer_tokens(chosen), 1), 0.0, 0) for lesson in chosen]
    # a step's budget may be too small for one of them
    batches = pack(rows, budget=max(stage.microbatch_tokens, *(len(row.ids) for row in rows)))
    scored = engine.score(batches, logprob_score(1.0))
    return float(-sum((s["logprob"].cpu() * b.ce_weight_T).sum() for s, b in zip(scored, batches, strict=True)))
