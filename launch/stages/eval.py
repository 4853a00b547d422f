"""Held-out tasks: every model plays them, and the environment makes the tables."""

from __future__ import annotations

from typing import Any

from ...core.files import write_json
from ...core.progress import Progress
from ...core.rng import fold
from ...rl.evaluation import TEST, Evaluation, Judged, Results
from ...rl.rollout.sampler import Sampler
from ...rl.tasks import Tasks
from ..job import Job
from ..settings.verbs import Score
from .common import build_engine, sampler_of, sampling
from .on_policy import picture
from .verbs import environment, require_judged, require_tasks


def check(stage: Score, job: Job) -> None:
    """Before the run starts: the environment opens and has tasks to evaluate on."""
    if job.mesh.is_main:
        with environment(stage, job) as tasks:
            require_judged(tasks)
            require_tasks(tasks, TEST, stage.name)


def run(stage: Score, job: Job) -> dict[str, Any]:
    """Play, judge, write the tables and the summary in words. Every data rank plays its share."""
    with environment(stage, job) as tasks:
        require_tasks(tasks, TEST, stage.name)
        parts = tasks.parts(stage.n)
        judged: Judged = {}
        rounds = len(stage.models) * len(stage.temperatures) * len(parts)
        progress = Progress(stage.name, rounds, speak=job.mesh.is_main)
        for name in stage.models:
            with sampling(job, stage.name, build_engine(job, None, name), sampler_of(stage, job)) as sampler:
                for temperature in stage.temperatures:
                    for part, asked in parts.items():
                        shown = tasks.shown_as(name, temperature, part)
                        judged[name, temperature, part] = _play(stage, job, tasks, sampler, asked, temperature, shown)
                        progress.update(len(judged))
        pair = {"before": stage.before, "after": stage.after, "control": stage.control}
        evaluation = Evaluation(stage.models, stage.temperatures, stage.samples, parts, judged, **pair)
        results: Results = job.mesh.from_main(lambda: tasks.results(evaluation))
    if job.mesh.is_main:
        for name, table in results.tables.items():
            job.run.write_result(f"{stage.name}-{name}" if name else stage.name, table)
        if results.summary is not None:
            write_json(job.run.path / "summary.json", results.summary)
    job.mesh.barrier()
    return results.outcome


def _play(
    stage: Score, job: Job, tasks: Tasks, sampler: Sampler, asked: list[Any], temperature: float, name: str | None
) -> list[list[Any]]:
    """One model's judgements of all tasks, at one temperature; the first few episodes go to the report."""
    samples = stage.samples if temperature else 1
    share = job.mesh.share(list(enumerate(asked)))

    def play() -> list[list[Any]]:
        episodes = [tasks.episode(task, i, k) for i, task in share for k in range(samples)]
        params = tasks.params(stage.max_new_tokens, temperature)
        played = tasks.play(sampler, episodes, params, fold(job.recipe.seed, 3))
        if job.mesh.is_main and name:
            job.run.write_rollouts(f"{stage.name}-{name}", 0, picture(0, episodes, played, tasks.shown))
        judged = tasks.judgements(episodes, played)
        return [judged[i : i + samples] for i in range(0, len(judged), samples)]

    return [of_task for part in job.mesh.gather(job.mesh.from_leader(play)) for of_task in part]
