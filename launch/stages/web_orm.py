"""The outcome reward model: trained on judged rollouts, measured on held-out tasks, and asked by later stages."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...core.engine import Engine
from ...core.errors import ConfigError
from ...data.packing import TrainSequence
from ...kernels.policy import PolicySettings
from ...rl.objective import make_loss
from ...rl.statistics import Estimate
from ...rl.webrl.orm import NO, YES, accuracy, by_kind, verdict_row, weighed, yes_score
from ...rl.webrl.prompts import single_token
from ...rl.webrl.sites import pool_of
from ...rl.webrl.steps import WebTrajectory
from ..job import Job
from ..settings.web import WebOrm
from .common import build_engine
from .web import fit_items, prompter_of, read_steps, score_all, sites_of

BUDGET = 16384
SHARES = ("accuracy", "balanced", "successes", "failures", "majority")


def held_out(intent: str, every: int) -> bool:
    """Whether a task is held out; all trajectories of one task fall on the same side."""
    return int.from_bytes(hashlib.blake2b(intent.encode(), digest_size=4).digest()) % every == 0


def probabilities(job: Job, engine: Engine, trajectories: Sequence[WebTrajectory]) -> list[float]:
    """P(YES) of every trajectory; all data ranks give the same list."""
    if not trajectories:
        return []
    prompter = prompter_of(job, verdict=True)
    words = [single_token(prompter.tokenizer, word) for word in (YES, NO)]
    rows = [verdict_row(prompter, t) for t in trajectories]
    scored = score_all(job, engine, rows, yes_score(*words), BUDGET)["yes"]
    return [float(scored[i][-1]) for i in range(len(rows))]


def run(stage: WebOrm, job: Job) -> dict[str, Any]:
    """Train on YES and NO in equal parts by weight, and measure what the held-out tasks say."""
    # the world's score is the truth here, whatever a rollout's reward came from
    known = [
        (name, replace(t, reward=t.score)) for name in stage.data for t in read_steps(job, name) if t.score is not None
    ]
    learnt = [t for _, t in known if not held_out(t.intent, stage.heldout_every)]
    kept_back = [(name, t) for name, t in known if held_out(t.intent, stage.heldout_every)]
    wins = sum(t.success for t in learnt)
    if not 0 < wins < len(learnt):
        raise ConfigError(
            f"stages: {stage.name}: {wins} of {len(learnt)} trajectories of {', '.join(stage.data)} succeeded; it "
            "needs both kinds: raise"
            " steps of the imitation before it, or samples of the rollout"
        )
    prompter = prompter_of(job, verdict=True)
    built = [verdict_row(prompter, t) for t in learnt]
    weights = [len(learnt) / (2 * wins) if t.success else len(learnt) / (2 * (len(learnt) - wins)) for t in learnt]
    engine = build_engine(job, stage.training.optimizer, stage.init)

    def rows(share: list[int], whole: list[int]) -> list[TrainSequence]:
        seen = sum(len(built[i].ids) - 2 for i in whole)
        return [weighed(built[i], weights[i] / len(whole), stage.prompts / seen) for i in share]

    loss = make_loss(PolicySettings())
    outcome = fit_items(
        job, stage.name, engine, stage.training, len(built), rows, loss, lambda sums: {"loss": sums["loss"]}
    )
    said = probabilities(job, engine, [t for _, t in kept_back])
    judged = [(name, t, p) for (name, t), p in zip(kept_back, said, strict=True)]
    measured = _measured(stage, job, judged, learnt)
    return {
        **outcome,
        "learnt": {"trajectories": len(learnt), "tasks": len({t.intent for t in learnt}), "successes": wins},
        **measured,
    }


def _measured(
    stage: WebOrm, job: Job, judged: Sequence[tuple[str, WebTrajectory, float]], lessons: Sequence[WebTrajectory]
) -> dict[str, Any]:
    """Write the table of all held-out trajectories with their stages and P(YES); what the stage tells. `lessons`
    teach the baseline.
    """
    chosen = [(t, p) for _, t, p in judged]
    kinds = {t.task.task_id: (t.task.template_id, t.task.template) for t in pool_of(sites_of(job))}
    known = [(kinds.get(t.task_id, t.site), t.success) for t in lessons]
    guesses = by_kind(known, [kinds.get(t.task_id, t.site) for t, _ in chosen])
    accuracy, guessed = _accuracy(chosen), _accuracy([(t, p) for (t, _), p in zip(chosen, guesses, strict=True)])
    if job.mesh.is_main:
        parts = {site: [(t, p) for t, p in chosen if t.site == site] for site in sorted({t.site for t, _ in chosen})}
        parts |= {f"all of {name}": [(t, p) for source, t, p in judged if source == name] for name in stage.data}
        rows = [(stage.name, "model", accuracy), ("the commoner answer of each kind of task", "baseline", guessed)]
        rows += [(name, "model", _accuracy(part)) for name, part in parts.items() if part]
        table = {
            "title": f"Outcome reward model on held-out tasks: {stage.name}",
            "columns": [
                "accuracy",
                "mean of both classes",
                "of successes",
                "of failures",
                "always the commoner answer",
            ],
            "rows": [
                {"name": name, "kind": kind, "cells": [_cell(found[key]) for key in SHARES]}
                for name, kind, found in rows
            ],
            "note": f"{len(chosen)} trajectories of {len({t.intent for t, _ in chosen})} tasks that it was not "
            "trained on, against the"
            " world's score; always the commoner answer has 50 % as the mean of both classes. Wilson's 95 % intervals.",
        }
        job.run.write_result(stage.name, table)
    cells = {name: value.to_cell() for name, value in accuracy.items() if value is not None}
    return {"held_out": len(chosen), "balanced": None, **cells, "balanced_by_kind_of_task": _cell(guessed["balanced"])}


def _accuracy(judged: Sequence[tuple[WebTrajectory, float]]) -> dict[str, Estimate | None]:
    return accuracy([p for _, p in judged], [t.success for t, _ in judged])


def _cell(value: Estimate | None) -> Any:
    return "none" if value is None else value.to_cell()
