"""Planning with a world model: one actor, several arms on the same held-out tasks, success by site with intervals."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ...core.errors import ConfigError
from ...core.files import write_json
from ...core.progress import Progress as Bar
from ...core.rng import fold
from ...data.packing import pack, unpack
from ...rl.evaluation import percent
from ...rl.rollout.open import open_sampler
from ...rl.rollout.resample import make_with_republish
from ...rl.rollout.sampler import Sampler, SamplingParams
from ...rl.statistics import paired_difference, proportion
from ...rl.web_pages.config import WebPageEnvironment
from ...rl.web_pages.tasks import WebPageTasks
from ...rl.webrl.critic import state_row, twin_score
from ...rl.webrl.episode import act_randomly
from ...rl.webrl.plan_config import PlanArm
from ...rl.webrl.planning import Planner, PredictedPage, Tally, Value, WorldModel
from ...rl.webrl.sites import Players, Seat, lives_elsewhere, make_world, pool_of, reset_sites
from ...rl.webrl.world_models import (
    CorruptedWorld,
    CriticValue,
    LanguageWorld,
    Progress,
    SampledValue,
    TrueWorld,
    oracle_pages,
)
from ...rl.worlds.web.generate import SiteTask
from ..job import Job
from ..settings.verbs import Reinforce, Tune
from ..settings.web import WebPlan
from .common import build_engine
from .verbs import environment
from .web import prompter_of, sites_of
from .web_critic import build_twin

ALL, BUDGET, SEED = "all", 16384, 51
Results = dict[int, tuple[str, bool]]  # task -> (site, solved)
Publish = Callable[[], None]


def check(stage: WebPlan, job: Job) -> None:
    """Before the run starts: what an arm needs of the tasks and their sites is there."""
    tasks, elsewhere = _tasks(stage, job), lives_elsewhere(sites_of(job), "test")
    for arm in stage.arms:
        where = f"stages: {stage.name}.arms: '{arm.name}'"
        if elsewhere and arm.world in ("true", "corrupted"):
            raise ConfigError(
                f"{where}: world: {arm.world} tries actions on a second copy of the sites, which tasks of a file do "
                "not have; use world: model"
            )
        if arm.world != "none" and arm.value == "progress" and not all(t.steps for t in tasks):
            raise ConfigError(
                f"{where}: value: progress is the place on an oracle's way, which tasks of a file do not have; use "
                "value: sampled"
            )
        if arm.world != "none" and arm.value == "critic" and job.recipe.parallel.model_size > 1:
            raise ConfigError(
                f"{where}: value: critic needs tensor, pipeline and context = 1, as every rank plans for itself"
            )
        if arm.world == "model":
            trained = _trained(arm, job)
            env = trained.env or job.recipe.env if isinstance(trained, Tune | Reinforce) else None
            if not isinstance(env, WebPageEnvironment):
                raise ConfigError(
                    f"{where}: model: '{arm.model}' is no model of page changes; name one with an env of web-page"
                )


def _trained(arm: PlanArm, job: Job) -> Any:
    """The stage that trained the world model of an arm."""
    return next(stage for stage in job.recipe.stages if stage.name == arm.model)


def _tasks(stage: WebPlan, job: Job) -> list[SiteTask]:
    pool = pool_of(sites_of(job), "test")
    return pool[: stage.n] if stage.n else pool


def run(stage: WebPlan, job: Job) -> dict[str, Any]:
    """Play every arm on the same tasks and write one table. On sites elsewhere there is no oracle, and nobody clicks at
    random unless the recipe says so.
    """
    tasks, settings = _tasks(stage, job), sites_of(job)
    scripted, elsewhere = all(t.steps for t in tasks), lives_elsewhere(settings, "test")
    known = make_world(settings, "test") if scripted else None
    ways = {t.task.task_id: oracle_pages(known, t) for t in tasks} if known is not None else {}
    solved: dict[str, Results] = {}
    outcomes: dict[str, Any] = {}
    invalid = 0
    bar = Bar(stage.name, len(stage.arms), speak=job.mesh.is_main)
    with ExitStack() as stack:
        actor, publish = _open(stage, job, stage.actor, "actor", stack)
        for arm in stage.arms:
            solved[arm.name], tally, more, lost = _play(stage, job, arm, actor, publish, tasks, ways)
            invalid += lost
            outcomes[arm.name] = {"solved": _rate(solved[arm.name]).to_cell(), **tally.__dict__, **more}
            bar.update(len(solved), f"{arm.name}: {percent(_rate(solved[arm.name]))}")
    baseline = not elsewhere or settings.random_elsewhere
    ends = {
        "random policy": job.mesh.from_main(lambda: _random(job, stage, tasks)) if baseline else None,
        "oracle": {i: (t.task.sites[0], True) for i, t in enumerate(tasks)} if scripted else None,
    }
    if job.mesh.is_main:
        job.run.guard()
        job.run.write_result(stage.name, _table(stage, solved, ends, tasks, invalid, outcomes))
        if stage.headline:
            write_json(job.run.path / "summary.json", _summary(stage, solved))
    return {"tasks": len(tasks), "invalid": invalid, **outcomes}


def _play(
    stage: WebPlan,
    job: Job,
    arm: PlanArm,
    actor: Sampler,
    publish: Publish,
    tasks: list[SiteTask],
    ways: dict[str, list[PredictedPage]],
) -> tuple[Results, Tally, dict[str, int], int]:
    """One arm on this rank's tasks; results, tally and counts of all ranks."""
    prompter, seed = prompter_of(job), fold(job.recipe.seed, SEED)
    players = Players(sites_of(job), prompter, "test")
    params = SamplingParams(stage.max_new_tokens, stage.temperature, top_p=stage.top_p, stop_ids=prompter.stop_ids)
    with ExitStack() as stack:
        world, publish_world = _world(stage, job, arm, tasks, ways, stack)
        value = _value(job, arm, ways, actor)
        seats = [Seat(task, number, 0) for number, task in job.mesh.share(list(enumerate(tasks)))]

        def reset() -> None:
            job.mesh.from_main(lambda: reset_sites(sites_of(job), "test"))

        reset()

        def unreadable() -> int:
            return getattr(world, "unreadable", 0) + getattr(value, "unreadable", 0)

        def play() -> tuple[Results, Tally, int, int]:
            results: Results = {}
            before, planner = unreadable(), Planner(arm, actor, params, seed, world, value)
            for part in players.parts(seats, job.mesh.data_size):
                episodes = [players.episode(place, s.task, s.prompt_id, 0) for place, (_, s) in enumerate(part)]
                planner.play(episodes)
                for episode in episodes:
                    if episode.fault is None:
                        results[episode.prompt_id] = (episode.task.task.sites[0], episode.world.score >= 1.0)
            return results, planner.tally, unreadable() - before, len(seats) - len(results)

        def begin_anew() -> None:
            publish()
            publish_world()
            reset()

        made = make_with_republish(job.mesh, actor, play, begin_anew, f"stage {stage.name}, arm {arm.name}")
        parts = job.mesh.gather(made)
    tally, whole = Tally(), Results()
    for part_results, part_tally, _, _ in parts:
        whole.update(part_results)
        tally.add(part_tally)
    more, lost = {"unreadable": sum(part[2] for part in parts)}, sum(part[3] for part in parts)
    return dict(sorted(whole.items())), tally, more, lost


def _open(stage: WebPlan, job: Job, model: str, name: str, stack: ExitStack) -> tuple[Sampler, Publish]:
    """A sampler on a finished stage's weights, closed with the stack, and what sends it these weights again."""
    engine = build_engine(job, None, model)
    folder = job.stage_folder(stage.name) / name.replace(" ", "-")
    opened = open_sampler(stage.rollouts.sampler, engine, job.model, folder, mesh=job.mesh)
    stack.callback(opened.close)

    def publish() -> None:
        if opened.publish is not None:
            opened.publish(engine.steps)

    publish()
    return opened.sampler, publish


def _world(
    stage: WebPlan,
    job: Job,
    arm: PlanArm,
    tasks: list[SiteTask],
    ways: dict[str, list[PredictedPage]],
    stack: ExitStack,
) -> tuple[WorldModel | None, Publish]:
    """What an arm plans with, and what sends a model that is one its weights again."""
    seed = fold(job.recipe.seed, SEED, 1)
    if arm.world == "none":
        return None, lambda: None
    if arm.world == "model":
        pages = stack.enter_context(environment(_trained(arm, job), job))
        assert arm.model is not None and isinstance(pages, WebPageTasks)
        sampler, publish = _open(stage, job, arm.model, f"{arm.name} world", stack)
        params = pages.params(arm.max_new_tokens, 0.0)
        return LanguageWorld(sampler, pages.tokenizer, pages.style, params, seed, pages.multiple), publish
    true = TrueWorld(lambda: make_world(sites_of(job), "test"))
    if arm.world == "true":
        return true, lambda: None
    elsewhere: dict[str, list[PredictedPage]] = {}
    for task in tasks:
        elsewhere.setdefault(task.task.sites[0], []).extend(ways[task.task.task_id])
    return CorruptedWorld(true, elsewhere, arm.wrong, seed), lambda: None


def _value(job: Job, arm: PlanArm, ways: dict[str, list[PredictedPage]], actor: Sampler) -> Value | None:
    if arm.world == "none":
        return None
    if arm.value == "progress":
        return Progress(ways)
    prompter = prompter_of(job)
    if arm.value == "sampled":
        params = SamplingParams(256, 1.0, stop_ids=prompter.stop_ids)
        return SampledValue(actor, prompter.tokenizer, params, fold(job.recipe.seed, SEED, 2), arm.budget)
    assert arm.critic is not None
    critic = build_twin(job, None, arm.critic, resume=arm.critic)

    def score(prompts: list[tuple[int, ...]]) -> list[float]:
        rows = [state_row(p, prompter.stop_id) for p in prompts]
        batches = pack(rows, budget=max(BUDGET, max(len(r.ids) for r in rows)))
        values = unpack(batches, [s["value"] for s in critic.score(batches, twin_score)])
        return [float(values[i][-1]) for i in range(len(rows))]

    return CriticValue(score)


def _random(job: Job, stage: WebPlan, tasks: list[SiteTask]) -> Results:
    players, results = Players(sites_of(job), prompter_of(job), "test"), Results()
    for number, task in enumerate(tasks):
        episode = players.episode(0, task, number, 0)
        act_randomly(episode, random.Random(f"{job.recipe.seed} {stage.name} random {number}"))
        if episode.fault is None:
            results[number] = (task.task.sites[0], episode.solved)
    return results


def _rate(results: Results, site: str = ALL) -> Any:
    outcomes = [solved for where, solved in results.values() if site in (ALL, where)]
    return proportion(sum(outcomes), len(outcomes))


def _table(
    stage: WebPlan,
    solved: dict[str, Results],
    ends: dict[str, Results | None],
    tasks: list[SiteTask],
    invalid: int,
    outcomes: dict[str, Any],
) -> dict[str, Any]:
    sites = sorted({t.task.sites[0] for t in tasks})
    kinds = {arm.name: "control" if arm.control else "model" for arm in stage.arms}
    lines = [("random policy", "baseline", ends["random policy"])]
    lines += [(name, kinds[name], results) for name, results in solved.items()]
    lines.append(("oracle", "ceiling", ends["oracle"]))
    rows = [
        {"name": name, "kind": kind, "cells": [_rate(results, s).to_cell() for s in (ALL, *sites)]}
        for name, kind, results in lines
        if results is not None
    ]
    pages = [
        f"{n}: {t['exact']} of {t['checked']} expected pages came true" for n, t in outcomes.items() if t["checked"]
    ]
    note = (
        f"{len(tasks)} test tasks, one episode each, temperature {stage.temperature:g}; Wilson's 95 % intervals; "
        f"{invalid} invalid episodes"
    )
    note = ". ".join([f"{note} left out", *pages]) + "."
    return {"title": "Planning with a world model", "columns": [ALL, *sites], "rows": rows, "note": note}


def _summary(stage: WebPlan, found: dict[str, Results]) -> dict[str, Any]:
    assert stage.headline is not None
    best = found[stage.headline]
    lines = []
    for name, results in found.items():
        if name != stage.headline:
            both = sorted(set(best) & set(results))
            gain = paired_difference([best[k][1] for k in both], [results[k][1] for k in both])
            points = f"{100 * gain.value:+.1f} points ({100 * gain.low:+.1f} to {100 * gain.high:+.1f})"
            lines.append(f"Against {name} ({percent(_rate(results))}): {points}.")
    return {
        "headline": f"{stage.headline} solves {percent(_rate(best))} of {len(best)} held-out tasks.",
        "paragraphs": lines,
    }
