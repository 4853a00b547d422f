"""New instructions from failed ones: other instances of the failed templates, or a language model behind an
OpenAI-compatible URL; then the critic's filter and the feasibility filter. How many every filter lets through is
counted."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.rng import fold
from ...data.trajectory import Invalid
from ..worlds.web.generate import SiteTask
from ..worlds.web.tasks import parse_task
from .chat import ChatApi
from .steps import MADE, WebTrajectory

LOW, HIGH = 0.05, 0.75  # of the critic's value of the first state; either head inside is enough
SEEDS = 10  # failed tasks that one request shows
ASKED = 25  # tasks that one request asks for: what its 2,048 tokens hold
PATIENCE = 3  # rounds in a row without a new task, after which the writer has no more

WRITE = """Here are tasks for an agent on one web site ({site}):
{tasks}
Write {count} more tasks for the same site. They should be varied, realistic, clear to a reader who sees \
nothing else, and about as hard.
Use names of things that occur in the tasks above and make none up. Put each task between back-ticks, and write \
nothing else between any."""
FEASIBLE = """The web site {site} offers no: {denied}.
Can this task be done on it? `{task}`
Give the reason in one sentence, then end with [YES] or [NO]."""
DENIED = {
    "map": "traffic, weather, favourites, live location, bookings, flights, trains, events",
    "shopping_admin": "e-mailing of orders, electronic invoices, returns, refunds, profile updates, recommendations",
    "shopping": (
        "discount filters, changes of a delivery address, payment data, order status, tracking, chat support, "
        "after-sales service"
    ),
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


def mutate(
    failed: Sequence[WebTrajectory], pool: Sequence[SiteTask], used: set[str], count: int, seed: int
) -> list[SiteTask]:
    """Other instances of the templates that failed, as often as they failed; those never used come first, and none
    twice.
    """
    template_of = {t.task.task_id: t.task.template_id for t in pool}
    weights = Counter(template_of[t.task_id] for t in failed if t.task_id in template_of)
    if not weights:
        weights = Counter(template_of.values())
    rng = random.Random(fold(seed, 11))
    ranked = sorted(
        pool, key=lambda t: (t.task.intent in used, rng.random() ** (1 / max(weights[t.task.template_id], 0.25)) * -1)
    )
    return list({t.task.intent: t for t in ranked}.values())[:count]


def draw(pool: Sequence[SiteTask], used: set[str], count: int, seed: int) -> list[SiteTask]:
    """Instances of any template at random, whatever failed before: what a curriculum is compared with. Those never
    used come first, and none twice."""
    rng = random.Random(fold(seed, 11))
    ranked = sorted(pool, key=lambda t: (t.task.intent in used, rng.random()))
    return list({t.task.intent: t for t in ranked}.values())[:count]


def again(tasks: Sequence[SiteTask], count: int, seed: int) -> list[SiteTask]:
    """The same tasks once more in another order, over and over until there are `count`."""
    rng = random.Random(fold(seed, 11))
    found: list[SiteTask] = []
    while tasks and len(found) < count:
        found += rng.sample(list(tasks), min(len(tasks), count - len(found)))
    return found


def write_round(
    by_site: Mapping[str, Sequence[str]], api: ChatApi, missing: int, rng: random.Random
) -> list[tuple[str, str]]:
    """(site, task) of one round of requests, all in flight together: as many for every site as `missing` tasks need,
    each showing failed tasks of that site. A request that got no answer brings nothing."""
    share = -(-missing // len(by_site))
    asked = [(site, min(ASKED, share - done)) for site in sorted(by_site) for done in range(0, share, ASKED)]
    texts = []
    for site, count in asked:
        shown = rng.sample(list(by_site[site]), min(SEEDS, len(by_site[site])))
        texts.append(WRITE.format(site=site, tasks="\n".join(f"- `{task}`" for task in shown), count=count))
    answers = api.ask_all(texts, temperature=1.0)
    pairs = zip(asked, answers, strict=True)
    return [(site, task) for (site, _), answer in pairs if isinstance(answer, str) for task in backticked(answer)]


def possible(tasks: Sequence[tuple[str, str]], api: ChatApi) -> list[bool | Invalid]:
    """Of (site, task) pairs whether the site can do them, asked together; Invalid where no answer came."""
    texts = [
        FEASIBLE.format(site=site, denied=DENIED.get(site, "nothing that is known"), task=task) for site, task in tasks
    ]
    answers = api.ask_all(texts, temperature=0.0)
    return [a if isinstance(a, Invalid) else "[YES]" in a and "[NO]" not in a for a in answers]


def written(
    failed: Sequence[WebTrajectory],
    starts: Mapping[str, Mapping[str, Any]],
    api: ChatApi,
    count: int,
    seed: int,
    known: Iterable[str] = (),
) -> list[SiteTask]:
    """`count` tasks that a language model writes, by site, none of them in `known`; fewer where several rounds in a row
    bring nothing new. They have no ground truth: an outcome reward model must judge them. `starts` holds one known task
    record of every site, for its start page and login."""
    rng = random.Random(fold(seed, 12))
    by_site: dict[str, list[str]] = {}
    for trajectory in failed:
        if trajectory.site in starts:
            by_site.setdefault(trajectory.site, []).append(trajectory.intent)
    seen = {*known, *(intent for intents in by_site.values() for intent in intents)}
    made: list[SiteTask] = []
    quiet = 0
    while by_site and len(made) < count and quiet < PATIENCE:
        before = len(made)
        for site, text in write_round(by_site, api, count - len(made), rng):
            if text not in seen:
                seen.add(text)
                made.append(open_task(starts[site], text, f"{MADE}{fold(seed, len(made)) % 10**9}"))
        quiet = 0 if len(made) > before else quiet + 1
    return made[:count]


def open_task(like: Mapping[str, Any], intent: str, task_id: str) -> SiteTask:
    """A task without ground truth: the release's template asks for the answer N/A, and nobody may read its score."""
    judged = {
        "eval_types": ["string_match"],
        "reference_answers": {"exact_match": "N/A"},
        "reference_url": "",
        "program_html": [],
    }
    record = {
        **like,
        "intent": intent,
        "task_id": task_id,
        "eval": judged,
        "intent_template": "",
        "intent_template_id": -1,
    }
    return SiteTask(parse_task(record), "train", ())


def outside(values: Sequence[tuple[float, float]], low: float = LOW, high: float = HIGH) -> list[float]:
    """How far each task is from being neither hopeless nor mastered: 0 where either head's value lies in [low,
    high].
    """
    return [min(max(low - v, v - high, 0.0) for v in pair) for pair in values]


def feasible(tasks: Sequence[SiteTask], api: ChatApi | None) -> list[bool | Invalid]:
    """Whether the sites can do them: known for generated instances, asked of a language model for written ones, else
    by the deny-list.
    """
    asked = [t for t in tasks if not t.steps]
    if api is None:
        said = [not _denied(t) for t in asked]
    else:
        said = possible([(t.task.sites[0], t.task.intent) for t in asked], api) if asked else []
    answers = iter(said)
    return [True if t.steps else next(answers) for t in tasks]


def _denied(task: SiteTask) -> bool:
    words = set(re.findall(r"[a-z]+", task.task.intent.lower()))
    phrases = [p for p in DENIED.get(task.task.sites[0], "").split(", ") if p and not p.startswith("features")]
    return any(words >= set(re.findall(r"[a-z]+", phrase.lower())) for phrase in phrases)


def select(
    candidates: Sequence[SiteTask],
    count: int,
    values: Callable[[Sequence[SiteTask]], list[tuple[float, float]]] | None,
    api: ChatApi | None,
    low: float = LOW,
    high: float = HIGH,
    nearest: bool = True,
) -> Made:
    """Candidates through both filters, the first `count` that pass. Without a critic (phase 1) there is no critic
    filter. A critic that finds almost all mastered, or hopeless, ends no run and leaves no phase with a handful of
    tasks: those `nearest` to the range fill it up, and are counted as such."""
    made = Made()
    made.counts["candidates"] = len(candidates)
    passed = list(candidates)
    if values is not None and candidates:
        far = outside(values(candidates), low, high)
        passed = [t for t, distance in zip(candidates, far, strict=True) if distance == 0]
        missing = count - len(passed)
        if nearest and missing > 0:
            outer = sorted((i for i, distance in enumerate(far) if distance > 0), key=far.__getitem__)[:missing]
            made.counts["nearest"] = len(outer)
            passed += [candidates[i] for i in outer]
    made.counts["critic"] = len(passed) - made.counts["nearest"]
    while passed and len(made.tasks) < count:  # no more are asked about than are still wanted
        part, passed = passed[: count - len(made.tasks)], passed[count - len(made.tasks) :]
        for task, answer in zip(part, feasible(part, api), strict=True):
            if isinstance(answer, Invalid):
                made.counts["unanswered"] += 1
            elif answer:
                made.tasks.append(task)
    made.counts["kept"] = len(made.tasks)
    return made
