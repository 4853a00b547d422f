"""Held-out tasks: every model plays them, and the environment makes the tables."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ...core.batch import PackedBatch
from ...core.engine import Engine
from ...core.errors import ConfigError
from ...core.files import make_folder, write_json
from ...core.progress import Progress
from ...core.rng import fold
from ...rl.evaluation import TEST, Evaluation, Judged, Results
from ...rl.journal import Journal, JournalSampler
from ...rl.objective import logprob_score
from ...rl.own.config import DataEnvironment, OwnEnvironment
from ...rl.own.tasks import shared_tasks
from ...rl.rollout.resample import make_with_republish
from ...rl.rollout.sampler import Sampler
from ...rl.tasks import Tasks
from ..job import Job, StopRequested
from ..recipe_warnings import met_by, require_clear
from ..settings.verbs import Arm, Collect, Reinforce, Score, Tune
from .common import sampling
from .session import tell_damage
from .verbs import environment, require_judged, require_sampler, require_tasks


def check(stage: Score, job: Job) -> None:
    """Before the run starts: the environment opens and has tasks to evaluate on."""
    require_sampler(stage, job)
    require_clear(stage, job.recipe)
    if job.mesh.is_main:
        with environment(stage, job) as tasks:
            require_judged(tasks, TEST, stage.samples if stage.temperatures[-1] else 1)
            require_tasks(tasks, TEST, stage.name)
            tasks.require_room(stage.max_new_tokens, TEST)
            if shared := _trained_on(stage, job, tasks, tasks.of(TEST)):
                job.warn(
                    f"stage '{stage.name}': {len(shared)} of {len(tasks.of(TEST))} test tasks are among those to train "
                    f"on, such as {shared[0]!s:.80}; leave them out of one, for their scores say nothing of new tasks"
                )


def _trained_on(stage: Score, job: Job, tasks: Tasks, asked: Sequence[Any]) -> list[Any]:
    """Those of the tasks asked that are among the training tasks of the user's own, as the stages that train have
    them: this stage's environment may hold out others. Where nothing is trained, only rows name what was.
    """
    own, stages = stage.env or job.recipe.env, job.recipe.stages
    if not isinstance(own, DataEnvironment | OwnEnvironment):
        return []
    if any(isinstance(other, Tune | Reinforce) for other in stages):
        envs = [other.env or job.recipe.env for other in stages if isinstance(other, Collect | Tune | Reinforce)]
    else:
        envs = [job.recipe.env] if isinstance(own, DataEnvironment) else []
    trained, seen = list[Any](), list[Any]()
    for env in envs:
        if isinstance(env, DataEnvironment) and isinstance(own, DataEnvironment):  # asked as these are
            env = replace(own, train=env.train, test=env.test, hold_out_every=env.hold_out_every)
        if type(env) is not type(own) or env in seen:
            continue
        seen.append(env)
        with suppress(ConfigError):  # of other rows, which cannot be asked as these are
            with nullcontext(tasks) if env == own else environment(replace(stage, env=env), job) as others:
                trained += others.of("train")
    return shared_tasks(trained, asked)


def run(stage: Score, job: Job) -> dict[str, Any]:
    """Play, judge, write the tables and the summary in words. Every data rank plays its share. A stop is heard between
    two rounds; what was sampled until then, or until a kill, is not sampled again.
    """
    journal = job.stage_folder(stage.name) / "journal"
    with environment(stage, job) as tasks:
        require_tasks(tasks, TEST, stage.name)
        parts = tasks.parts(stage.n)
        judged: Judged = {}
        probes: dict[tuple[str, str], Any] = {}
        shown: dict[tuple[str, str], str] = {}
        kinds: dict[str, str] = {other.name: other.kind for other in job.recipe.stages}
        rounds = len(stage.compared) * len(stage.temperatures) * len(parts)
        progress = Progress(stage.name, rounds, speak=job.mesh.is_main)
        with sampling(job, stage) as of:
            for arm in stage.compared:
                with _met_by(arm, stage, job, tasks) as met:
                    with of(arm.model) as (sampler, engine, publish):
                        job.mesh.from_main(lambda met=met: met.reset(TEST))
                        for temperature in stage.temperatures:
                            for part, asked in parts.items():
                                if judged and job.mesh.any_rank(job.stop_asked):
                                    raise StopRequested
                                kept = met.shown_as(kept_as(arm, stage), temperature, part)
                                round_ = f"{kept_as(arm, stage)}-t{temperature:g}-{part}"
                                noted = _noted(stage, job, sampler, engine, journal / round_)
                                shown = ({(arm.name, part): f"{stage.name}-{kept}"} if kept else {}) | shown
                                judged[arm.name, temperature, part] = _play(
                                    stage, job, met, noted, publish, asked, temperature, kept
                                )
                                progress.update(len(judged))
                    for part, asked in parts.items():
                        probes[arm.name, part] = met.probe(partial(_logprobs, engine), asked)
        evaluation = Evaluation(
            stage.names,
            stage.temperatures,
            stage.samples,
            parts,
            judged,
            stage.before,
            stage.after,
            stage.control,
            tuple(arm.name for arm in stage.compared if arm.control),
            {arm.name: cost_of(job, arm.model) for arm in stage.compared},
            {arm.name: kinds[arm.model] for arm in stage.compared},
            probes,
            shown,
        )

        def tables() -> Results:
            known = len(_trained_on(stage, job, tasks, parts.get(TEST, [])))
            return tasks.results(replace(evaluation, known=known))

        results: Results = job.mesh.from_main(tables)
    if job.mesh.is_main:
        for name, table in results.tables.items():
            job.run.write_result(f"{stage.name}-{name}" if name else stage.name, table)
        if results.summary is not None:
            write_json(job.run.path / "summary.json", results.summary)
        for folder, page in results.pages.items():
            write_json(make_folder(job.run.path / folder) / f"{stage.name}.json", page)
        shutil.rmtree(journal, ignore_errors=True)
    job.mesh.barrier()
    return results.outcome


def kept_as(arm: Arm, stage: Score) -> str:
    """What the files of an arm's episodes are called after: its model, numbered where several arms ask the same one."""
    alike = [other.name for other in stage.compared if other.model == arm.model]
    return arm.model if len(alike) == 1 else f"{arm.model}.{alike.index(arm.name) + 1}"


@contextmanager
def _met_by(arm: Arm, stage: Score, job: Job, tasks: Tasks) -> Iterator[Tasks]:
    """How an arm's model meets its tasks: as it was trained, unless the arm says otherwise."""
    own = met_by(arm, stage, job.recipe)
    if own == (stage.env or job.recipe.env):
        yield tasks
        return
    with environment(replace(stage, env=own), job) as met:
        yield met


def _noted(stage: Score, job: Job, sampler: Sampler, engine: Engine, folder: Path) -> Sampler:
    """The sampler, with a journal of what it samples in a round; answers of pictures and grids are too many tokens to
    keep. Collective.
    """
    if getattr(stage.env or job.recipe.env, "fixed_length", False):
        return sampler
    journal = Journal(folder, job.mesh.data_rank) if job.mesh.is_leader else None
    tell_damage(job, journal.resume(0) if journal else [])
    return JournalSampler(sampler, journal, lambda: engine.steps) if journal else sampler


def _logprobs(engine: Engine, batches: list[PackedBatch]) -> list[Any]:
    return [scored["logprob"] for scored in engine.score(batches, logprob_score(1.0))]


def cost_of(job: Job, model: str) -> tuple[int, int]:
    """(actions, gradient tokens) that a model took: its stage, those it started from, the models that imagined its
    world, and the episodes they all learnt from.
    """
    actions = tokens = 0
    found, left = set[str](), [model]
    while left:
        if (name := left.pop()) in found:
            continue
        found.add(name)
        stage = next(s for s in job.recipe.stages if s.name == name)
        if isinstance(stage, Collect) and stage.again is not None:
            left.append(stage.again)  # the very same actions
            continue
        outcome = job.outcome(name)
        actions += outcome.get("actions", 0)
        if isinstance(stage, Collect):
            continue
        tokens += outcome.get("tokens", 0)
        env = (stage.env or job.recipe.env) if isinstance(stage, Reinforce) else None
        world = getattr(env, "imagined_by", None)
        read = getattr(stage if isinstance(stage, Tune) else env, "data", None)
        left += [name for name in (getattr(stage, "init", None), world, read) if name is not None]
    return actions, tokens


def _play(
    stage: Score,
    job: Job,
    tasks: Tasks,
    sampler: Sampler,
    publish: Callable[[], None],
    asked: list[Any],
    temperature: float,
    name: str | None,
) -> list[list[Any]]:
    """One model's judgements of all tasks, at one temperature; the first few episodes go to the report."""
    samples = stage.samples if temperature else 1
    share = job.mesh.share(list(enumerate(asked)))

    def play() -> list[list[Any]]:
        episodes = [tasks.episode(task, i, k) for i, task in share for k in range(samples)]
        params = tasks.params(stage.max_new_tokens, temperature)
        played = tasks.play(sampler, episodes, params, fold(job.recipe.seed, tasks.evaluation_key))
        if job.mesh.is_main and name:
            job.run.write_rollouts(f"{stage.name}-{name}", 0, tasks.pictures(episodes, played))
        judged = tasks.judgements(episodes, played)
        return [judged[i : i + samples] for i in range(0, len(judged), samples)]

    def begin_anew() -> None:
        publish()
        job.mesh.from_main(lambda: tasks.reset(TEST))  # what was played has changed its sites

    made = make_with_republish(job.mesh, sampler, play, begin_anew, f"stage {stage.name}")
    return [of_task for part in job.mesh.gather(made) for of_task in part]
