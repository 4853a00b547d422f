"""Tasks on the local sites in WebArena's format, and the scripts that solve them: known ground truth, split by
instance.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
from dataclasses import dataclass
from typing import Any

from . import templates_shop, templates_work
from .actions import WebAction
from .backend import ActionFailed
from .elements import Element, Page
from .sites import PLACEHOLDERS, SITES, SiteSet
from .tasks import WebTask, expand, parse_task
from .templates import TEMPLATES, Instance, Step, Template

CONTENT = "content"  # key of a task record: the seed of the content that it is about, where that is not 0
TEST_SHARE = 5  # every fifth instance of a template, by its hash
VALIDATION_SHARE = 5  # every fifth training task, by the hash of its sentence
_REGISTERED = (templates_shop, templates_work)  # importing them fills TEMPLATES


@dataclass(frozen=True)
class SiteTask:
    """A task, the split it belongs to and the script that solves it."""

    task: WebTask
    split: str
    steps: tuple[Step, ...]


def record_of(template: Template, instance: Instance, task_id: int) -> dict[str, Any]:
    """One task as a record of a task file, with placeholders for addresses."""
    intent = template.text
    for name, value in instance.values.items():
        intent = intent.replace("{{" + name + "}}", value)
    login = [key for key in template.sites if SITES[key].needs_login]
    return {
        "sites": list(template.sites),
        "task_id": task_id,
        "require_login": bool(login),
        "storage_state": f"./.auth/{'.'.join(login)}_state.json" if login else None,
        "start_url": template.start or f"__{template.sites[0].upper()}__",
        "geolocation": None,
        "intent_template": template.text,
        "instantiation_dict": dict(instance.values),
        "intent": intent,
        "require_reset": False,
        "eval": instance.evaluation,
        "intent_template_id": template.id,
    }


def _split(template: Template, instance: Instance) -> str:
    key = f"{template.id} {sorted(instance.values.items())}"
    return "test" if hashlib.blake2b(key.encode(), digest_size=4).digest()[0] % TEST_SHARE == 0 else "train"


def in_split(task: SiteTask, split: str) -> bool:
    """Whether a task belongs to `all`, `train`, `test`, or to one of the parts of `train`: `validation` and `fit`."""
    if split in ("fit", "validation"):
        digest = hashlib.blake2b(f"validation {task.task.intent}".encode(), digest_size=4).digest()
        return task.split == "train" and (digest[0] % VALIDATION_SHARE == 0) == (split == "validation")
    return split in ("all", task.split)


@functools.lru_cache(maxsize=64)
def make_site_tasks(seed: int = 0, sites: tuple[str, ...] = (), most: int = 24) -> tuple[SiteTask, ...]:
    """All tasks on the content of a seed: at most `most` instances of every template whose sites are all among
    `sites` (all if empty).
    """
    content = SiteSet(seed)
    tasks: list[SiteTask] = []
    for template in sorted(TEMPLATES.values(), key=lambda t: t.id):
        if sites and not set(template.sites) <= set(sites):
            continue
        instances = list(template.make(dict(content.sites), random.Random(f"{template.id} {seed}")))
        random.Random(f"order {template.id} {seed}").shuffle(instances)
        for position, instance in enumerate(instances[:most]):
            record = record_of(template, instance, 1_000_000 * seed + 1000 * template.id + position)
            if seed:
                record[CONTENT] = seed
            task = parse_task(expand(record, PLACEHOLDERS), f"template {template.id}")
            tasks.append(SiteTask(task, _split(template, instance), tuple(instance.steps)))
    return tuple(tasks)


def resolve(step: Step, page: Page) -> WebAction:
    """One line of a script as an action on the page at hand."""
    what, target, text = step[0], step[1], step[2] if len(step) > 2 else ""
    if what == "exit":
        return WebAction("exit", text=target)
    if what == "tab":
        return WebAction("switch_tab", text=target)
    for label, element in page.labels.items():
        if _fits(what, target, element):
            kind = {"click": "click", "tick": "click", "type": "type", "search": "search", "select": "select"}[what]
            return WebAction(kind, label, text)  # type: ignore[arg-type]
    raise ActionFailed(f"no element for {step}")


def _fits(what: str, target: str, element: Element) -> bool:
    attributes = element.attributes
    if what == "click":
        return element.tag in ("a", "button") and element.text == target
    if what == "tick":
        return attributes.get("name") == target and attributes.get("type") == "checkbox"
    if what == "select":
        return element.tag == "select" and attributes.get("title") == target
    return element.tag in ("input", "textarea") and attributes.get("placeholder") == target


def script_text(action: WebAction, element: Element | None) -> str:
    """An action as a demonstration writes it: a comment that names the element, then the call."""
    if element is None:
        return action.call
    label = re.sub(
        r"\s+",
        " ",
        element.text or element.attributes.get("placeholder") or element.attributes.get("title") or element.tag,
    )
    return f"# Element: {label[:80]}\n{action.call}"
