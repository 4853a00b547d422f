"""Transitions of the local sites, recorded in the page model, as questions for a world model of pages."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from ...core.errors import ConfigError
from ...core.files import make_folder
from ...rl.webrl.sites import make_world, pool_of
from ...rl.webrl.world_data import site_transitions
from ..job import Job
from ..settings.language import WebPageData
from ..settings.web_live import WebSitePages
from . import web_page_data
from .web import seeded, sites_of


def run(stage: WebSitePages, job: Job) -> dict[str, Any]:
    """Record, then go on as with any file of transitions."""
    sites = sites_of(job)
    pool = [t for t in pool_of(sites) if t.steps]
    if not pool:
        raise ConfigError(f"stages: {stage.name}: env.tag has no task with an oracle; choose one of the local sites")
    path = job.stage_folder(f"{stage.name}-recorded") / "transitions.jsonl"
    if job.mesh.is_main:
        make_folder(path.parent)
        job.run.guard()
        tasks = seeded(job, stage.name).sample(pool, min(stage.tasks, len(pool)))
        found = site_transitions(make_world(sites), make_world(sites), tasks, stage.others, job.recipe.seed)
        path.write_text("".join(json.dumps(t.to_row(), ensure_ascii=False) + "\n" for t in found), encoding="utf-8")
    job.mesh.barrier()
    told: dict[str, Any] = {f.name: getattr(stage, f.name) for f in fields(WebPageData)}
    told |= {"kind": "web-page-data", "transitions": str(path)}
    return web_page_data.run(WebPageData(**told), job)
