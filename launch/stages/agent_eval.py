"""Agents on held-out seeds, beside the random policy and the ceiling; every arm with what it cost."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ...core.errors import ConfigError
from ...core.files import write_json
from ...core.progress import Progress
from ...core.rng import fold
from ...data.trajectory import Trajectory
from ...rl.agents.config import WorldsEnvironment
from ...rl.agents.evaluate import AgentScores, baseline_rows, difference, state_perplexity, summarise
from ...rl.agents.rollout import Instance, Player, seats_of, turns_of
from ...rl.objective import logprob_score
from ...rl.rollout.sampler import Sampler, SamplingParams
from ...rl.statistics import Estimate
from ...rl.worlds.tasks import Task, named_tasks
from ..job import Job
from ..settings.agent import AgentEvaluate, Arm
from ..settings.verbs import Reinforce, Tune
from .common import build_engine, sampler_of, sampling
from .evaluate import percent
from .on_policy import picture
from .verbs import tokenizer_of


def worlds_of(stage: AgentEvaluate, job: Job) -> dict[str, Task]:
    """The tags that arms are compared on."""
    settings = job.recipe.env
    if not isinstance(settings, WorldsEnvironment):
        raise ConfigError(f"env: stage '{stage.name}' evaluates agents; give the recipe a section env of kind worlds")
    return named_tasks(stage.tags or settings.tags, settings.tag_files)


def agent_of(job: Job, arm: Arm) -> WorldsEnvironment:
    """How an arm's model meets its world: as it was trained, unless the arm says otherwise."""
    stages = {stage.name: stage for stage in job.recipe.stages}
    trained = stages[arm.model]
    if isinstance(trained, Tune) and trained.data is not None:
        trained = stages[trained.data]
    settings = arm.env or getattr(trained, "env", None) or job.recipe.env
    assert isinstance(settings, WorldsEnvironment)
    return settings


def budget(job: Job, model: str) -> tuple[int, int]:
    """(actions in worlds, gradient tokens) that an arm took: its stage, those it started from, and the data they learnt from."""
    actions = tokens = 0
    played: set[str] = set()
    name: str | None = model
    while name is not None:
        stage = next(s for s in job.recipe.stages if s.name == name)
        outcome = job.outcome(name)
        tokens += outcome.get("tokens", 0)
        if isinstance(stage, Reinforce):
            actions += outcome["actions"]
        if isinstance(stage, Tune) and stage.data is not None and stage.data not in played:
            actions += job.outcome(stage.data)["actions"]
            played.add(stage.data)
        name = getattr(stage, "init", None)
    return actions, tokens


def check(stage: AgentEvaluate, job: Job) -> None:
    """Before the run starts: the worlds are there."""
    worlds_of(stage, job)


def run(stage: AgentEvaluate, job: Job) -> dict[str, Any]:
    """Play, score, write one table a tag and the summary in words."""
    tasks, tokenizer = worlds_of(stage, job), tokenizer_of(job)
    params = SamplingParams(stage.max_new_tokens, stage.temperature, stop_ids=tokenizer.stop_ids)
    progress = Progress(stage.name, len(stage.arms) * len(tasks), speak=job.mesh.is_main)
    scores: dict[tuple[str, str], AgentScores] = {}
    greedy: dict[tuple[str, str], AgentScores] = {}
    perplexities: dict[tuple[str, str], list[float]] = {}
    for arm in stage.arms:
        engine, player = build_engine(job, None, arm.model), Player(tokenizer, agent_of(job, arm))
        with sampling(job, stage.name, engine, sampler_of(stage, job)) as sampler:
            for tag, task in tasks.items():
                scores[arm.name, tag] = play_part(stage, job, player, sampler, arm, task, params)
                if stage.greedy:  # one episode a seed, so that the report shows the same rooms of every arm
                    once, certain = replace(stage, samples_per_group=1), replace(params, temperature=0.0)
                    greedy[arm.name, tag] = play_part(once, job, player, sampler, arm, task, certain)
                perplexities[arm.name, tag] = perplexity(stage, engine, agent_of(job, arm), task, tokenizer)
                progress.update(len(scores))
    costs = {arm.name: budget(job, arm.model) for arm in stage.arms}
    if job.mesh.is_main:
        for task in tasks.values():
            for name, told in tables(stage, task, scores, greedy, perplexities, costs).items():
                job.run.write_result(name, told)
        if stage.headline:
            write_json(job.run.path / "summary.json", summary(stage, tasks, scores, greedy, costs))
    job.mesh.barrier()
    found: dict[str, Any] = {}
    for (name, tag), s in scores.items():
        found |= {f"{name}/{tag}/pass@{k}": s.passes(k).to_cell() for k in ks(stage)}
        if stage.headline not in (None, name):
            found[f"{stage.headline} minus {name}/{tag}/pass@1"] = difference(scores[stage.headline, tag], s).to_cell()
            if stage.greedy:
                found[f"{stage.headline} minus {name}/{tag}/greedy"] = difference(greedy[stage.headline, tag], greedy[name, tag]).to_cell()
        if stage.greedy:
            found[f"{name}/{tag}/greedy"] = greedy[name, tag].passes(1).to_cell()
    return {**found, **{f"{name}/actions": c[0] for name, c in costs.items()}, **{f"{name}/tokens": c[1] for name, c in costs.items()}}


def play_part(
    stage: AgentEvaluate, job: Job, player: Player, sampler: Sampler, arm: Arm, task: Task, params: SamplingParams
) -> AgentScores:
    """One arm on all seeds of one tag; the first few episodes go to the report."""
    tag, groups = task.name, -(-stage.groups // job.mesh.data_size) * job.mesh.data_size
    instances = [Instance(task, stage.first_seed + number) for number in range(groups)]
    seats = list(job.mesh.share(seats_of(instances, stage.samples_per_group)))

    def play() -> list[Trajectory]:
        played = player.play(sampler, seats, params, fold(job.recipe.seed, 6))
        if job.mesh.is_main:
            job.run.write_rollouts(f"{stage.name}-{arm.model}-{tag}", 0, picture(0, seats, played, turns_of))
        return played

    return summarise([t for part in job.mesh.gather(job.mesh.from_leader(play)) for t in part])


def ks(stage: AgentEvaluate) -> list[int]:
    """1 and all powers of two up to the samples of a seed."""
    return [k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if k in (1, stage.samples_per_group) or k < stage.samples_per_group]


def perplexity(stage: AgentEvaluate, engine: Any, agent: WorldsEnvironment, task: Task, tokenizer: Any) -> list[float]:
    """Of state texts without and with coordinates, each as shown in the prompt and alone."""

    def score(batches: list) -> list:
        return [r["logprob"] for r in engine.score(batches, logprob_score(1.0))]

    seeds = range(stage.first_seed, stage.first_seed + min(stage.groups, 64))
    return [
        state_perplexity(score, task, seeds, tokenizer, agent, coordinates=coordinates, alone=alone)
        for coordinates in (False, True)
        for alone in (False, True)
    ]


def tables(
    stage: AgentEvaluate, task: Task, scores: dict, greedy: dict, perplexities: dict, costs: dict[str, tuple[int, int]]
) -> dict[str, dict[str, Any]]:
    """The table of success, and the table of what the arms did, cost and know."""
    k, tag = stage.samples_per_group, task.name
    seeds = range(stage.first_seed, stage.first_seed + stage.groups)
    rows, facts = [], []
    ceiling_rows = []
    for name, kind, first, last in baseline_rows(task, seeds, k):
        cells = [*([first.to_cell()] if stage.greedy else []), first.to_cell(), last.to_cell()]  # chance decides a random policy either way
        (ceiling_rows if kind == "ceiling" else rows).append({"name": name, "kind": kind, "cells": cells})
    for arm in stage.arms:
        s: AgentScores = scores[arm.name, tag]
        kind = "control" if arm.control else "model"
        alone = [greedy[arm.name, tag].passes(1).to_cell()] if stage.greedy else []
        rows.append({"name": arm.name, "kind": kind, "cells": [*alone, s.passes(1).to_cell(), s.passes(k).to_cell()]})
        plain = [{"value": v} if math.isfinite(v) else "none" for v in perplexities[arm.name, tag]]
        counted = [{"value": costs[arm.name][0]}, {"value": costs[arm.name][1]}]
        seen = [e.to_cell() for e in (s.effective, s.format_ok, s.tokens, s.actions)]
        facts.append({"name": arm.name, "kind": kind, "cells": [*seen, *plain, *counted]})
    rows += ceiling_rows
    invalid = sum(scores[arm.name, tag].invalid for arm in stage.arms)
    note = (
        f"{len(seeds)} seeds from {stage.first_seed}, {k} samples each at temperature {stage.temperature:g}; unbiased Pass@k; "
        f"95 % intervals over seeds. {invalid} invalid samples left out."
    )
    columns = [*(["greedy"] if stage.greedy else []), "Pass@1", f"Pass@{k}"]
    names = ["state perplexity", "alone", "with coordinates", "alone"]
    return {
        f"{stage.name}-{tag}": {"title": f"{tag}: success", "columns": columns, "rows": rows, "note": note},
        f"{stage.name}-{tag}-turns": {
            "title": f"{tag}: what the arms did, know and cost",
            "facts": True,  # no scores, so no baseline stands beside them
            "columns": ["turns with effect", "right format", "answer tokens", "actions", *names, "actions in training", "gradient tokens"],
            "rows": facts,
            "note": "Perplexity of the first state's tokens: as it stands in the first prompt, and alone after one token. Actions and "
            "tokens of training count an arm's stage, all it started from and the play it learnt from.",
        },
    }


def summary(stage: AgentEvaluate, tasks: dict[str, Task], scores: dict, greedy: dict, costs: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """The headline's arm against every other one, in plain words."""
    assert stage.headline is not None
    tag = next(iter(tasks))
    best: AgentScores = scores[stage.headline, tag]
    others = [arm.name for arm in stage.arms if arm.name != stage.headline]
    gains = {name: difference(best, scores[name, tag]) for name in others}
    first = best.passes(1)
    ahead = [name for name, gain in gains.items() if gain.low > 0]
    headline = f"{tag}: {stage.headline} solves {percent(first)} at the first try; ahead of {', '.join(ahead) or 'none'} beyond chance."
    paragraphs = [f"{stage.headline} minus {name}: {points(gain)}, {gain.n} seeds." for name, gain in gains.items()]
    if stage.greedy:
        shares = {name: greedy[name, tag].passes(1) for name in (stage.headline, *others)}
        behind = [name for name in others if difference(greedy[stage.headline, tag], greedy[name, tag]).low <= 0]
        told = ", ".join(f"{name} {percent(share)}" for name, share in shares.items())
        against = "every other arm" if not behind else f"all but {', '.join(behind)}"
        paragraphs.append(f"Greedy, without chance: {told}; {stage.headline} is ahead of {against} beyond chance.")
    for name, kind, one, _ in baseline_rows(tasks[tag], range(stage.first_seed, stage.first_seed + stage.groups), stage.samples_per_group):
        paragraphs.append(f"{kind.capitalize()}: {name} {percent(one)}.")
    paragraphs.append("Budgets (actions, gradient tokens): " + "; ".join(f"{name} {a:,}, {t:,}" for name, (a, t) in costs.items()) + ".")
    models = {arm.name: f"{stage.name}-{arm.model}-{tag}" for arm in stage.arms}
    pair = [stage.arms[0].name, stage.headline]  # the report opens with one room, played by both
    return {"headline": headline, "paragraphs": paragraphs, "compare": [{"name": name, "rollouts": models[name]} for name in pair]}


def points(estimate: Estimate) -> str:
    return f"{100 * estimate.value:+.1f} points of Pass@1 (95 % interval {100 * estimate.low:+.1f} to {100 * estimate.high:+.1f})"
