"""Transitions of the local sites, recorded in the page model, as questions for a world model of pages."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from ...core.errors import ConfigError
from ...core.files import make_folder
from ...rl.webrl.world_data import site_transitions
from ..job import Job
from ..settings.language import WebPageData
from ..settings.web_live import WebSitePages
from . import web_page_data
from .web import make_world, pool_of, seeded, start_of


def run(stage: WebSitePages, job: Job) -> dict[str, Any]:
    """Record, then go on as with any file of transitions."""
    pool = [t for t in pool_of(start_of(job)) if t.steps]
    if not pool:
        raise ConfigError(f"stages: {stage.name}: the start's tag has no task with an oracle; choose one of the local sites")
    path = job.stage_folder(f"{stage.name}-recorded") / "transitions.jsonl"
    if job.mesh.is_main:
        make_folder(path.parent)
        job.run.guard()
        tasks = seeded(job, stage.name).sample(pool, min(stage.tasks, len(pool)))
        start = start_of(job)
        found = site_transitions(make_world(start), make_world(start), tasks, stage.others, job.recipe.seed)
        path.write_text("".join(json.dumps(t.to_row(), ensure_ascii=False) + "\n" for t in found), encoding="utf-8")
    job.mesh.barrier()
    told: dict[str, Any] = {f.name: getattr(stage, f.name) for f in fields(WebPageData)}
    told |= {"kind": "web-page-data", "transitions": str(path)}
    return web_page_data.run(WebPageData(**told), job)
