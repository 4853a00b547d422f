"""New instructions from what failed, through the critic's and the feasibility filter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ...core.engine import Engine
from ...core.errors import ConfigError
from ...core.files import make_folder
from ...core.rng import fold
from ...rl.webrl.chat import ChatApi
from ...rl.webrl.critic import state_row, twin_score
from ...rl.webrl.instructions import Made, again, draw, failures, mutate, select, written
from ...rl.webrl.sites import TASKS, Players, pool_of, read_tasks, write_tasks
from ...rl.worlds.web.generate import SiteTask
from ..job import Job, log
from ..settings.web import WebJudge, WebTasks
from .web import draw_seed, prompter_of, read_steps, score_all, sites_of
from .web_critic import build_twin

BUDGET = 16384
SPARE = 3  # candidates for each task that is wanted, so that filters leave enough
ROUNDS = 10  # of asking a language model for more


def run(stage: WebTasks, job: Job) -> dict[str, Any]:
    """Write the tasks of the next rollout. Every rank makes the same list; one writes it."""
    seen = [t for name in stage.failures for t in read_steps(job, name)]
    failed, pool = failures(seen), pool_of(sites_of(job))
    api = ChatApi(stage.url, stage.model) if stage.url else None
    critic = build_twin(job, None, stage.critic, resume=stage.critic) if stage.critic else None
    folder = make_folder(job.stage_folder(stage.name))
    kept, tried, values = Made(), list[SiteTask](), list[tuple[float, float]]()

    def filtered(tasks: list[SiteTask], valued: list[tuple[float, float]], count: int, nearest: bool) -> Made:
        # one rank asks the language model, so that all have the same tasks
        return job.mesh.from_main(
            lambda: select(tasks, count, (lambda _: valued) if valued else None, api, stage.low, stage.high, nearest)
        )

    # known tasks are all tried at once; what a language model writes has no end, so it is asked until enough came
    # through the filters
    for turn in range(ROUNDS if api else 1):
        missing = stage.count - len(kept.tasks)
        wanted = missing * SPARE if critic is not None else missing
        candidates = job.mesh.from_main(partial(_make, stage, job, (seen, failed, pool), api, wanted, tried, turn))
        if not candidates:
            break
        valued = _values(stage, job, critic, candidates) if critic is not None else []
        part = filtered(candidates, valued, missing, nearest=api is None)
        tried, values = [*tried, *candidates], [*values, *valued]
        kept.tasks += part.tasks
        kept.counts.update(part.counts)
        if len(kept.tasks) >= stage.count:
            break
    if not kept.tasks and tried and api is not None:
        kept = filtered(tried, values, stage.count, nearest=True)
    counts: dict[str, Any] = {}
    if job.mesh.is_main:
        if not kept.tasks:
            raise ConfigError(
                f"stages: {stage.name}: no task came through the filters ({dict(kept.counts)}); give other failures "
                "or another model"
            )
        if kept.counts["nearest"]:
            log.warning(
                "stage %s: the critic finds %d of %d tasks between %s and %s; the %d nearest are taken too",
                stage.name,
                kept.counts["critic"],
                len(tried),
                stage.low,
                stage.high,
                kept.counts["nearest"],
            )
        if len(kept.tasks) < stage.count and api is not None:
            log.warning(
                "stage %s: %d of %d tasks came through the filters: %s",
                stage.name,
                len(kept.tasks),
                stage.count,
                dict(kept.counts),
            )
        job.run.guard()
        write_tasks(folder / TASKS, kept.tasks)
        fresh = sum(t.task.intent not in {x.intent for x in seen} for t in kept.tasks)
        counts = {"failed": len(failed), "fresh": fresh, **kept.counts}
    return job.mesh.from_main(lambda: counts)


def _make(
    stage: WebTasks,
    job: Job,
    known: tuple[list, list, list[SiteTask]],
    api: ChatApi | None,
    wanted: int,
    tried: list[SiteTask],
    turn: int,
) -> list[SiteTask]:
    (seen, failed, pool), seed = known, draw_seed(job.recipe, stage)
    if stage.curriculum == "first":
        return again(_first_tasks(stage, job), wanted, seed)
    if api is None and stage.curriculum == "random":
        return draw(pool, {t.intent for t in seen}, wanted, seed)
    if api is None:
        return mutate(failed, pool, {t.intent for t in seen}, wanted, seed)
    starts = {site: t.task.raw for t in reversed(pool) for site in t.task.sites[:1] if len(t.task.sites) == 1}
    like = failed if stage.curriculum == "failures" else seen
    return written(like, starts, api, wanted, fold(seed, turn) if turn else seed, {t.task.intent for t in tried})


def _first_tasks(stage: WebTasks, job: Job) -> list[SiteTask]:
    """The tasks that the first of the stage's rollouts played."""
    settings = next(other for other in job.recipe.stages if other.name == stage.failures[0])
    played = settings.data if isinstance(settings, WebJudge) else settings.name
    return read_tasks(job.stage_folder(played) / TASKS)


def _values(stage: WebTasks, job: Job, engine: Engine, tasks: Sequence[SiteTask]) -> list[tuple[float, float]]:
    """Both heads' value of every task's first state."""
    prompter = prompter_of(job)
    players = Players(sites_of(job), prompter)
    rows = []
    for number, task in enumerate(tasks):
        prompt = players.episode(0, task, number, 0).context()
        if prompt is None:
            raise ConfigError(f"stages: {stage.name}: task {task.task.task_id} does not start")
        rows.append(state_row(prompt, prompter.stop_id))
    scored = score_all(job, engine, rows, twin_score, BUDGET)
    return [(float(scored["first"][i][-1]), float(scored["second"][i][-1])) for i in range(len(rows))]
