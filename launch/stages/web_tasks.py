"""New instructions from what failed, through the critic's and the feasibility filter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.errors import ConfigError
from ...core.files import make_folder
from ...rl.webrl.chat import ChatApi
from ...rl.webrl.critic import state_row, twin_score
from ...rl.webrl.instructions import failures, mutate, select, written
from ...rl.worlds.web.generate import SiteTask
from ..job import Job, log
from ..settings.web import WebTasks
from .web import TASKS, Players, pool_of, prompter_of, read_steps, score_all, start_of, write_tasks
from .web_critic import build_twin

BUDGET = 16384
SPARE = 3  # candidates for each task that is wanted, so that filters leave enough


def run(stage: WebTasks, job: Job) -> dict[str, Any]:
    """Write the tasks of the next rollout. Every rank makes the same list; one writes it."""
    seen = [t for name in stage.failures for t in read_steps(job, name)]
    failed, pool = failures(seen), pool_of(start_of(job))
    api = ChatApi(stage.url, stage.model) if stage.url else None
    wanted = stage.count * SPARE if stage.critic else stage.count
    # one rank asks the language model, so that all have the same tasks
    candidates: list[SiteTask] = job.mesh.from_main(lambda: _make(stage, job, seen, failed, pool, api, wanted))
    values = _values(stage, job, candidates) if stage.critic and candidates else None
    folder = make_folder(job.stage_folder(stage.name))
    told: dict[str, Any] = {}
    if job.mesh.is_main:
        found = select(candidates, stage.count, (lambda _: values) if values else None, api, stage.low, stage.high)
        if not found.tasks:
            raise ConfigError(
                f"stages: {stage.name}: no task came through the filters ({dict(found.counts)}); give other failures or another model"
            )
        if found.counts["nearest"]:
            log.warning(
                "stage %s: the critic finds none of %d tasks between %s and %s; the nearest are taken",
                stage.name,
                len(candidates),
                stage.low,
                stage.high,
            )
        job.run.guard()
        write_tasks(folder / TASKS, found.tasks)
        fresh = sum(t.task.intent not in {x.intent for x in seen} for t in found.tasks)
        told = {"failed": len(failed), "fresh": fresh, **found.counts}
    return job.mesh.from_main(lambda: told)


def _make(stage: WebTasks, job: Job, seen: list, failed: list, pool: list[SiteTask], api: ChatApi | None, wanted: int) -> list[SiteTask]:
    seed = job.recipe.seed + sum(map(ord, stage.name))
    if api is None:
        return mutate(failed, pool, {t.intent for t in seen}, wanted, seed)
    starts = {site: t.task.raw for t in reversed(pool) for site in t.task.sites[:1] if len(t.task.sites) == 1}
    return written(failed, starts, api, wanted, seed)


def _values(stage: WebTasks, job: Job, tasks: Sequence[SiteTask]) -> list[tuple[float, float]]:
    """Both heads' value of every task's first state."""
    assert stage.critic is not None
    engine = build_twin(job, None, stage.critic, resume=stage.critic)
    players, prompter = Players(job), prompter_of(job)
    rows = []
    for number, task in enumerate(tasks):
        prompt = players.episode(0, task, number, 0).context()
        if prompt is None:
            raise ConfigError(f"stages: {stage.name}: task {task.task.task_id} does not start")
        rows.append(state_row(prompt, prompter.stop_id))
    found = score_all(job, engine, rows, twin_score, BUDGET)
    return [(float(found["first"][i][-1]), float(found["second"][i][-1])) for i in range(len(rows))]
