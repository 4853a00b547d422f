"""Plays episodes of an environment, with or without a model, and writes what is worth imitating as shards."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.batch import PackedBatch
from ...core.engine import Engine
from ...core.errors import ConfigError, RolloutError
from ...core.files import make_folder
from ...core.progress import Progress
from ...core.rng import fold
from ...data.schema import TEXT
from ...data.shards import ShardWriter
from ...data.trajectory import Invalid, Trajectory
from ...rl.journal import ReplaySampler
from ...rl.objective import logprob_score
from ...rl.preparation import sampler_drift, score_rows
from ...rl.rollout.resample import make_with_republish
from ...rl.rollout.sampler import Sampler
from ...rl.step_record import require_agreement
from ...rl.tasks import Lesson, Tasks
from ..job import Job, StopRequested
from ..settings.base import sources
from ..settings.verbs import Collect
from .common import build_engine
from .session import Session
from .verbs import environment, require_judged, require_sampler, require_tasks

if TYPE_CHECKING:
    import torch

COMPARED = 64  # episodes per data rank whose log-probs the trainer recomputes
TRAIN, HELD_OUT, OTHERS = "train", "held_out", "others"  # folders of shards to imitate


def _makes_data(stage: Collect, job: Job) -> bool:
    """Whether the environment makes its own data in this stage."""
    return stage.name in sources(stage.env or job.recipe.env).values()


def check(stage: Collect, job: Job) -> None:
    """Before the run starts: the environment opens and has training tasks."""
    if _makes_data(stage, job) and (stage.model, stage.again, stage.least_reward) != (None, None, None):
        raise ConfigError(
            f"stages: {stage.name}: the environment makes its own data here; leave model, again and least_reward out"
        )
    if stage.model is not None:
        require_sampler(stage, job)
    if job.mesh.is_main:
        with environment(stage, job) as tasks:
            if _makes_data(stage, job):
                tasks.require_source()
                return
            if tasks.imagined_by is not None:
                raise ConfigError(
                    f"stages: {stage.name}.env.imagined_by: only stages of kind rl train in an imagined world; give it "
                    "in their env"
                )
            require_tasks(tasks, "train", stage.name)
            if stage.least_reward is not None:
                require_judged(tasks, "train")
            else:
                tasks.require_judge("train", 1)  # what judges the episodes anyway
            if stage.model is not None:
                tasks.require_room(stage.max_new_tokens, "train")


def run(stage: Collect, job: Job) -> dict[str, Any]:
    """Play all tasks and write the lessons. Sampled answers survive a stop or a kill in the journal; shards are written
    last.
    """
    with environment(stage, job) as tasks:
        if _makes_data(stage, job):
            made = job.mesh.from_main(lambda: tasks.make(job.run.guard))
            return made | _added(job, job.mesh.from_leader(lambda: tasks.make_part(job.run.guard, job.mesh)))
        assert stage.prompts is not None, "a recipe without them is refused"
        chosen = tasks.chosen(stage.prompts)
        asked = job.mesh.share(list(enumerate(chosen)))

        def dealt() -> list[Any]:
            return [tasks.episode(task, place, k) for place, task in asked for k in range(stage.samples_per_prompt)]

        episodes = dealt() if stage.model is None else []  # a model's are made anew for each attempt
        _empty(stage, job)
        job.mesh.from_main(lambda: tasks.keep(job.stage_folder(stage.name), chosen))

        def reset() -> None:
            if stage.model is not None:
                job.mesh.from_main(lambda: tasks.reset("train"))

        reset()
        played: list[Trajectory] = []  # on leaders
        with _sampler(stage, job, tasks, episodes) as (sampler, publish, compare):

            def learn() -> dict[str, int] | None:
                return _learn(stage, job, tasks, sampler, episodes or dealt(), played)

            def begin_anew() -> None:
                publish()
                reset()

            total = _added(job, make_with_republish(job.mesh, sampler, learn, begin_anew, f"stage {stage.name}"))
            _require_valid(stage, job, total, played)
            drift = compare(played)
        return {**total, **drift, **tasks.shares(total)}


def _require_valid(stage: Collect, job: Job, total: dict[str, int], played: list[Trajectory]) -> None:
    """Stop the run if too many episodes are Invalid: those left to imitate would be the easy ones."""
    most, count = stage.rollouts.max_invalid_share, total["invalid"] + total["trajectories"]
    if total["invalid"] > most * count:
        found = job.mesh.from_leader(lambda: Counter(t.reward.reason for t in played if isinstance(t.reward, Invalid)))
        (reason, _), *_ = sum(job.mesh.gather(found), Counter[str]()).most_common(1)
        raise RolloutError(
            f"stage {stage.name}: {total['invalid']} of {count} episodes are Invalid, above rollouts.max_invalid_share "
            f"= {most:g}; the commonest reason: {reason}"
        )


def _added(job: Job, counts: dict[str, int] | None) -> dict[str, int]:
    """The counts of all data ranks, added up once all shards are written. If one rank was asked to stop and has no
    counts, all stop.
    """
    parts = job.mesh.gather(counts, patient=True)
    job.mesh.barrier()
    counted = [part for part in parts if part is not None]
    if len(counted) < len(parts):
        raise StopRequested
    return {key: sum(part[key] for part in counted) for key in counted[0]}


@contextmanager
def _sampler(
    stage: Collect, job: Job, tasks: Tasks, episodes: list[Any]
) -> Iterator[tuple[Sampler, Callable[[], None], Callable[[list[Trajectory]], dict[str, float]]]]:
    """What answers: a stage's model, another stage's journal, or the environment's own player. Yielded with a function
    that sends the sampler its weights and, if it has its own copy, one that measures the drift from the model.
    """
    if stage.model is not None:
        engine = build_engine(job, None, stage.model)
        with closing(Session(job, stage.name, engine, stage.rollouts, 0, {})) as session:

            def publish() -> None:
                if session.publish is not None:
                    session.publish(engine.steps)

            publish()
            yield session.sampler, publish, lambda played: _drift(stage, job, engine, session, played)
    elif stage.again is not None:
        yield ReplaySampler(job.stage_folder(stage.again) / "journal"), lambda: None, lambda _: {}
    else:
        yield tasks.player(episodes), lambda: None, lambda _: {}


def _drift(stage: Collect, job: Job, engine: Engine, session: Session, played: list[Trajectory]) -> dict[str, float]:
    """Stop the run if the sampler does not match the model: stages that imitate its episodes would not notice. Every
    rank compares its first few episodes. Collective.
    """
    if session.publish is None:
        return {}
    session.rest()  # engines on the trainer's device make room for it
    few = job.mesh.from_leader(lambda: played[:COMPARED])

    def policy(batches: list[PackedBatch]) -> list[torch.Tensor]:
        return [scored["logprob"] for scored in engine.score(batches, logprob_score(stage.temperature))]

    wanted, budget = frozenset({"policy"}), job.model.max_positions
    scores = score_rows(wanted, few, {"policy": policy}, budget, job.mesh, engine.device)
    values = sampler_drift(few, scores, engine.steps, job.mesh.gather)
    require_agreement(values, stage.drift_gate, f"stage {stage.name}")
    return values


def _learn(
    stage: Collect, job: Job, tasks: Tasks, sampler: Sampler, episodes: list[Any], shown_to: list[Trajectory]
) -> dict[str, int] | None:
    """Play this data rank's episodes, write what they teach, and count; what was played is added to `shown_to`. None
    where a stop was asked for before all were played.
    """
    recorded = tasks.recorded() if stage.model is None and stage.again is None else None
    if recorded is not None:
        episodes, played = (list(job.mesh.share(part)) for part in recorded)
    else:
        try:
            played = _play(stage, job, tasks, sampler, episodes)
        except StopRequested:  # of this rank alone: its peers wait for its answer, and all ranks stop together
            return None
        episodes = episodes[: len(played)]
    shown_to += played
    if job.mesh.is_main and (shown := tasks.pictures(episodes, played)):
        job.run.write_rollouts(stage.name, 0, shown)
    valid = [(e, t) for e, t in zip(episodes, played, strict=True) if not isinstance(t.reward, Invalid)]
    lessons = [lesson for e, t in valid if _teaches(stage, t) for lesson in tasks.taught(e, t, stage.validation_share)]
    counts = {"trajectories": len(valid), "invalid": len(played) - len(valid), **tasks.counts(episodes, played)}
    return counts | _write(stage, job, lessons)


def _play(stage: Collect, job: Job, tasks: Tasks, sampler: Sampler, episodes: list[Any]) -> list[Trajectory]:
    """Play them in parts, and stop once more are Invalid than the whole stage may have. A request to stop is noticed
    between two parts.
    """
    params = tasks.params(stage.max_new_tokens, stage.temperature)
    each, played = stage.prompts_at_once * stage.samples_per_prompt, list[Trajectory]()
    most = stage.rollouts.max_invalid_share * (stage.prompts or 0) * stage.samples_per_prompt
    progress = Progress(stage.name, len(episodes), speak=job.mesh.is_main)
    for at in range(0, len(episodes), each):
        if at and job.stop_asked:
            raise StopRequested
        played += tasks.play(sampler, episodes[at : at + each], params, fold(job.recipe.seed, tasks.collection_key))
        progress.update(len(played))
        if sum(isinstance(t.reward, Invalid) for t in played) > most:
            break
    return played


def _teaches(stage: Collect, trajectory: Trajectory) -> bool:
    return stage.least_reward is None or (
        not isinstance(trajectory.reward, Invalid) and trajectory.reward >= stage.least_reward
    )


def _empty(stage: Collect, job: Job) -> None:
    """Create the folders for lessons, deleting what a killed stage had started to write."""
    if job.mesh.is_main:
        job.run.guard()
        for part in (TRAIN, HELD_OUT, OTHERS):
            shutil.rmtree(job.stage_folder(stage.name) / part, ignore_errors=True)
            make_folder(job.stage_folder(stage.name) / part)
    job.mesh.barrier()


def _write(stage: Collect, job: Job, lessons: list[Lesson]) -> dict[str, int]:
    """Write one sample per lesson, with its exact token ids and roles. Every data rank has its own shards."""
    parts: dict[str, list[Lesson]] = {TRAIN: [], HELD_OUT: [], OTHERS: []}
    for lesson in lessons:
        parts[OTHERS if not lesson.learn else HELD_OUT if lesson.held_out else TRAIN].append(lesson)
    for part, members in parts.items():
        folder, prefix = job.stage_folder(stage.name) / part, f"rank{job.mesh.data_rank:03d}"
        with ShardWriter(folder, kind=TEXT, prefix=prefix, max_samples=stage.samples_per_shard) as writer:
            for lesson in members:
                ids, roles = np.asarray(lesson.sequence.ids, np.int32), np.asarray(lesson.sequence.roles, np.int8)
                writer.write({**lesson.fields, "tokens.npy": ids, "roles.npy": roles})
    return {f"{part}_lessons": len(parts[part]) for part in (TRAIN, HELD_OUT)}
