"""MiniWoB++ pages as tasks: a page and a seed each, in WebArena's format, so that they travel through files like any
other task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .generate import SiteTask
from .miniwob_oracles import ORACLES
from .tasks import WebTask, parse_task

SITE, KEY = "miniwob", "miniwob"
FIRST = {"train": 0, "test": 1_000_000}  # seeds


def miniwob_tasks(pages: Sequence[str], instances: int, split: str) -> list[SiteTask]:
    """So many seeds of every page. What a page asks for is known once it is open: until then its name stands for it.
    Pages with an oracle have a step that says so."""
    found = []
    for number in range(instances):
        for part, first in FIRST.items():
            if split in ("all", part):
                for template, name in enumerate(pages):
                    task = parse_task(_record(name, first + number, template))
                    found.append(SiteTask(task, part, (("oracle", name),) if name in ORACLES else ()))
    return found


def _record(name: str, seed: int, template: int) -> dict[str, Any]:
    # the page itself judges; the format asks for an evaluation
    judged = {
        "eval_types": ["string_match"],
        "reference_answers": {"exact_match": "by the page"},
        "reference_url": "",
        "program_html": [],
    }
    common = {
        "task_id": f"{name}.{seed}",
        "sites": [SITE],
        "intent": f"{name} {seed}",
        "start_url": "about:blank",
        "eval": judged,
    }
    return {**common, "intent_template": name, "intent_template_id": template, KEY: {"page": name, "seed": seed}}


def place_of(task: WebTask) -> tuple[str, int]:
    """The page and the seed of a task."""
    place = task.raw.get(KEY)
    if not isinstance(place, dict):
        raise ValueError(f"task {task.task_id} is none of MiniWoB++: it has no key {KEY}")
    return str(place["page"]), int(place["seed"])
