"""The actor's epoch: advantages of the frozen critic, the actor at the phase's start as reference, one of six
methods.
"""

from __future__ import annotations

from typing import Any

from ...core.engine import Engine
from ...data.packing import TrainSequence
from ...rl.objective import logprob_score, make_loss
from ...rl.webrl.actor import WITH_REFERENCE, row, settings, weigh
from ...rl.webrl.critic import state_row, twin_score
from ..job import Job, log
from ..settings.web import WebActor
from .common import build_engine, first_checkpoint
from .web import fit_items, prompter_of, score_all
from .web_critic import build_twin
from .web_replay import Experience, experience_of


def values_of(job: Job, critic: Engine, experience: Experience, budget: int) -> list[list[float]]:
    """The critic's value of every state of every trajectory, the one after the last step included."""
    end = prompter_of(job).stop_id
    rows, sizes = [], []
    for t in experience.trajectories:
        states = [s.prompt for s in t.steps] + [t.steps[-1].following]
        rows += [state_row(state, end) for state in states]
        sizes.append(len(states))
    scored = score_all(job, critic, rows, twin_score, budget)["value"]
    flat, values = iter(float(scored[i][-1]) for i in range(len(rows))), []
    for size in sizes:
        values.append([next(flat) for _ in range(size)])
    return values


def run(stage: WebActor, job: Job) -> dict[str, Any]:
    """Weigh the phase's experience and train on it."""
    experience, training = experience_of(job, stage.data), stage.training
    values = None
    if stage.critic is not None:
        values = values_of(
            job, build_twin(job, None, stage.critic, stage.critic), experience, training.microbatch_tokens
        )
    chosen = set(experience.steps)
    weighed = [
        w
        for w in weigh(stage.method, experience.trajectories, values, lam=stage.lam)
        if (w.trajectory, w.index) in chosen
    ]
    counts = {"learnt": len(weighed), "positive": sum(w.value > 0 for w in weighed)}
    if not weighed:  # filtered imitation of a phase without success, for one: the actor stays as it is
        log.warning(
            "stage %s: method %s keeps no step of this phase; the actor stays as it is", stage.name, stage.method
        )
        unchanged = first_checkpoint(job, stage.name, build_engine(job, None, stage.init))
        return {"steps": 0, "items": 0, "checkpoint": unchanged, **counts}
    reference = {}
    if stage.method in WITH_REFERENCE:
        rows_ = [TrainSequence(w.step.ids) for w in weighed]
        frozen = build_engine(job, None, stage.init)
        reference = score_all(job, frozen, rows_, logprob_score(1.0), training.microbatch_tokens)["logprob"]
        del frozen
    engine = build_engine(job, training.optimizer, stage.init)

    def rows(share: list[int], whole: list[int]) -> list[TrainSequence]:
        return [row(stage.method, weighed[i], len(whole), reference.get(i)) for i in share]

    def describe(sums: dict[str, float]) -> dict[str, float]:
        means = {"loss": sums["loss"]}
        if sums["pg_tokens"] and stage.method in WITH_REFERENCE:
            means["ratio"] = sums["ratio"] / sums["pg_tokens"]
            means["kl"] = sums["reference_kl"] / sums["pg_tokens"]
        return means

    loss = make_loss(settings(stage.method, stage.beta, stage.length_normalize))
    return {**fit_items(job, stage.name, engine, training, len(weighed), rows, loss, describe), **counts}
