"""New instructions from failed ones: other instances of the failed templates, or a language model behind an OpenAI-compatible URL;
then the critic's filter and the feasibility filter. How many every filter lets through is counted."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.rng import fold
from ..worlds.web.generate import SiteTask
from ..worlds.web.tasks import parse_task
from .chat import ChatApi
from .steps import MADE, WebTrajectory

LOW, HIGH = 0.05, 0.75  # of the critic's value of the first state; either head inside is enough
SEEDS = 10  # failed tasks that one request shows

WRITE = """Here are tasks for an agent on one web site ({site}):
{tasks}
Write {count} more tasks for the same site. They should be varied, realistic, clear to a reader who sees nothing else, and about as hard.
Use names of things that occur in the tasks above and make none up. Put each task between back-ticks, and write nothing else between any."""
FEASIBLE = """The web site {site} offers no: {denied}.
Can this task be done on it? `{task}`
Give the reason in one sentence, then end with [YES] or [NO]."""
DENIED = {
    "map": "traffic, weather, favourites, live location, bookings, flights, trains, events",
    "shopping_admin": "e-mailing of orders, electronic invoices, returns, refunds, profile updates, recommendations",
    "shopping": "discount filters, changes of a delivery address, payment data, order status, tracking, chat support, after-sales service",
    "reddit": "features beyond forums, posts, comments, votes and profiles",
    "gitlab": "features beyond projects, issues, members and comments",
}
_SPAN = re.compile(r"`([^`\n]{3,500})`")


@dataclass
class Made:
    """New tasks and how many came through each filter."""

    tasks: list[SiteTask] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def backticked(text: str) -> list[str]:
    """Every span between back-ticks, in order, without repeats."""
    return list(dict.fromkeys(span.strip() for span in _SPAN.findall(text)))


def failures(trajectories: Sequence[WebTrajectory]) -> list[WebTrajectory]:
    """Of every task that no trajectory solved, one failed trajectory."""
    solved = {t.intent for t in trajectories if t.success}
    return list({t.intent: t for t in trajectories if t.intent not in solved}.values())


def mutate(failed: Sequence[WebTrajectory], pool: Sequence[SiteTask], used: set[str], count: int, seed: int) -> list[SiteTask]:
    """Other instances of the templates that failed, as often as they failed; those never used come first, and none twice."""
    template_of = {t.task.task_id: t.task.template_id for t in pool}
    weights = Counter(template_of[t.task_id] for t in failed if t.task_id in template_of)
    if not weights:
        weights = Counter(template_of.values())
    rng = random.Random(fold(seed, 11))
    ranked = sorted(pool, key=lambda t: (t.task.intent in used, rng.random() ** (1 / max(weights[t.task.template_id], 0.25)) * -1))
    return list({t.task.intent: t for t in ranked}.values())[:count]


def written(
    failed: Sequence[WebTrajectory], starts: Mapping[str, Mapping[str, Any]], api: ChatApi, count: int, seed: int
) -> list[SiteTask]:
    """Tasks that a language model writes, by site. They have no ground truth: an outcome reward model must judge them. `starts` holds
    one known task record of every site, for its start page and login."""
    rng = random.Random(fold(seed, 12))
    found: dict[str, SiteTask] = {}
    sites = sorted({t.site for t in failed if t.site in starts})
    each = -(-count // max(len(sites), 1))
    for site in sites:
        of_site = [t.intent for t in failed if t.site == site]
        shown = rng.sample(of_site, min(SEEDS, len(of_site)))
        listed = "\n".join(f"- `{task}`" for task in shown)
        for text in backticked(api.ask(WRITE.format(site=site, tasks=listed, count=each), temperature=1.0)):
            if text not in of_site and text not in found:
                found[text] = open_task(starts[site], text, f"{MADE}{fold(seed, len(found)) % 10**9}")
    return list(found.values())[:count]


def open_task(like: Mapping[str, Any], intent: str, task_id: str) -> SiteTask:
    """A task without ground truth: the release's template asks for the answer N/A, and nobody may read its score."""
    judged = {"eval_types": ["string_match"], "reference_answers": {"exact_match": "N/A"}, "reference_url": "", "program_html": []}
    record = {**like, "intent": intent, "task_id": task_id, "eval": judged, "intent_template": "", "intent_template_id": -1}
    return SiteTask(parse_task(record), "train", ())


def outside(values: Sequence[tuple[float, float]], low: float = LOW, high: float = HIGH) -> list[float]:
    """How far each task is from being neither hopeless nor mastered: 0 where either head's value lies in [low, high]."""
    return [min(max(low - v, v - high, 0.0) for v in pair) for pair in values]


def feasible(task: SiteTask, api: ChatApi | None) -> bool:
    """Whether the site can do it: known for generated instances, asked of a language model for written ones, else by the deny-list."""
    if task.steps:
        return True
    site = task.task.sites[0]
    denied = DENIED.get(site, "")
    if api is None:
        words = set(re.findall(r"[a-z]+", task.task.intent.lower()))
        return not any(
            words >= set(re.findall(r"[a-z]+", phrase.lower())) for phrase in denied.split(", ") if not phrase.startswith("features")
        )
    answer = api.ask(FEASIBLE.format(site=site, denied=denied, task=task.task.intent), temperature=0.0)
    return "[YES]" in answer and "[NO]" not in answer


def select(
    candidates: Sequence[SiteTask],
    count: int,
    values: Callable[[Sequence[SiteTask]], list[tuple[float, float]]] | None,
    api: ChatApi | None,
    low: float = LOW,
    high: float = HIGH,
) -> Made:
    """Candidates through both filters, the first `count` that pass. Without a critic (phase 1) there is no critic filter. A critic that
    finds all mastered, or all hopeless, ends no run: the `count` tasks nearest to the range are taken then, and counted as such."""
    made = Made()
    made.counts["candidates"] = len(candidates)
    passed = list(candidates)
    if values is not None and candidates:
        far = outside(values(candidates), low, high)
        passed = [t for t, distance in zip(candidates, far, strict=True) if distance == 0]
        if not passed:
            passed = [candidates[i] for i in sorted(range(len(far)), key=far.__getitem__)[:count]]
            made.counts["nearest"] = len(passed)
    made.counts["critic"] = len(passed) - made.counts["nearest"]
    for task in passed:
        if len(made.tasks) == count:
            break
        if feasible(task, api):
            made.tasks.append(task)
    made.counts["kept"] = len(made.tasks)
    return made
