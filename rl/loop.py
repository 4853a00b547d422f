"""The RL loop: roll out, weigh, train, record. One call of `reinforce` is one stage; every rank calls it.

The leader of each data rank rolls out and sends its peers the trajectories; from there on all ranks do the same things in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..core.batch import PackedBatch
from ..core.engine import Engine, StepResult
from ..core.errors import ConfigError, NumericsError
from ..core.mesh import Mesh
from ..data.balance import spread
from ..data.packing import TrainSequence
from ..data.trajectory import Invalid, Trajectory
from ..kernels.batch_invariant import batch_invariant
from . import algorithms
from .algorithms import common, ppo
from .algorithms.config import PPO, Algorithm
from .objective import logprob_score, make_loss
from .preparation import check_staleness, critic_values, keep_enough, minibatches, require_valid, sampler_drift, score_rows, silent_row
from .rollout.ahead import Ahead
from .rollout.episodes import Episode, rollout
from .rollout.sampler import Sampler, SamplingParams
from .statistics import mean


@dataclass(frozen=True)
class Hooks:
    """What the loop needs of its surroundings."""

    mesh: Mesh
    record: Callable[[int, dict[str, Any], Sequence[Episode], Sequence[Trajectory]], None]
    save: Callable[[int, dict[str, Any]], None]  # when it is time; a request to stop leaves the loop from here


@dataclass(frozen=True)
class Updates:
    """How often the optimizer steps on one rollout: over its mini-batches, and over the whole of it again."""

    minibatches: int = 1
    epochs: int = 1

    @property
    def count(self) -> int:
        return self.minibatches * self.epochs


ONCE = Updates()


def reinforce(
    engine: Engine,
    sampler: Sampler,
    episodes_of: Callable[[int], list[Episode]],
    algorithm: Algorithm,
    params: SamplingParams,
    hooks: Hooks,
    *,
    steps: range,
    tokens: int,
    microbatch_tokens: int,
    drift_gate: float,
    seed: int,
    reference: Callable[[list[PackedBatch]], list[torch.Tensor]],
    kl_every: int,
    critic: Engine | None = None,
    updates: Updates = ONCE,
    refill: Callable[[int, int], list[Episode]] | None = None,
    ahead: int = 0,
    publish: Callable[[int], None] | None = None,
    rollout_deadline_s: float = 3600.0,
    max_invalid_share: float = 0.25,
    play: Callable[[Sampler, list[Episode], SamplingParams, int], list[Trajectory]] = rollout,
    validate: Callable[[int], dict[str, float]] = lambda step: {},
    rest: Callable[[], dict[str, float]] = dict,
) -> int:
    """Train for `steps` and return the gradient tokens seen. `episodes_of(step)` gives this data rank's episodes, whole groups only.

    `reference` scores batches with the weights the stage began with; without a KL term it is asked every `kl_every` steps.
    `critic` is PPO's; `refill(step, round)` gives fresh prompts in place of groups that DAPO throws away. `publish(version)` brings
    a sampler with weights of its own up to date; with `ahead` = 1 the next step is sampled while this one is trained.
    `play` runs the episodes, where the plain rollout does not do. `validate(step)` looks at the weights of so many steps before they
    are trained further; `rest` tells the sampler that it is the trainer's turn. What both return is recorded. All `updates` of a rollout
    compare with the log-probs from before the first of them; checkpoints fall between rollouts.
    """
    mesh = hooks.mesh
    if "values" in algorithms.needs(algorithm) and critic is None:
        raise ConfigError(f"algorithm: {algorithm.kind} needs a critic, which this stage does not train; choose one without (grpo, rloo)")
    if ahead and refill is not None:
        raise ConfigError("ahead: does not go with refills, which must be sampled by the weights of their own step")
    loss = make_loss(algorithms.settings(algorithm, params.temperature))

    def policy(batches: list[PackedBatch]) -> list[torch.Tensor]:
        with batch_invariant(getattr(getattr(sampler, "inner", sampler), "batch_invariant", False)):  # as it sampled
            return [r["logprob"] for r in engine.score(batches, logprob_score(params.temperature))]

    scorers = {
        "reference": reference,
        "policy": policy,
        "values": lambda batches: [r["value"] for r in critic.score(batches, ppo.value_score)] if critic else [],
    }

    def roll(step: int) -> tuple[list[Episode], list[Trajectory]]:
        episodes = episodes_of(step)
        return episodes, play(sampler, episodes, params, seed)

    def fresh(step: int, number: int) -> list[Trajectory]:
        assert refill is not None
        return mesh.from_leader(lambda more=refill: play(sampler, more(step, number), params, seed))

    def take(step: int) -> list[Trajectory]:
        nonlocal episodes
        episodes, trajectories = source.take(step)
        return trajectories

    episodes: list[Episode] = []  # of this step, on leaders
    source = Ahead(roll, steps, ahead, rollout_deadline_s)
    if publish is not None:
        publish(engine.steps)
    for step in steps:
        extras = validate(step)
        begun = time.monotonic()
        trajectories = mesh.from_leader(lambda step=step: take(step))
        check_staleness(trajectories, engine.steps, ahead * updates.count)
        require_valid(trajectories, max_invalid_share, mesh.gather, f"step {step}")
        kept, extra = keep_enough(algorithm, trajectories, partial(fresh, step) if refill else None, mesh.gather)
        extras |= rest()
        rolled = time.monotonic()
        sampled = sum(mesh.gather(common.action_tokens([*trajectories, *extra])))
        scores = score_rows(algorithms.needs(algorithm), kept, scorers, microbatch_tokens, mesh, engine.device)
        rows = algorithms.prepare(algorithm, kept, scores, mesh.gather)
        compare = scores.reference is None and step % kl_every == 0
        results: list[StepResult] = []
        criticised: list[StepResult] = []
        for _ in range(updates.epochs):
            for part in minibatches(algorithm, rows, kept, updates.minibatches, mesh.gather):
                batches = _batches(algorithm, part, microbatch_tokens, mesh, engine.build.width)
                results.append(engine.step(with_reference(batches, reference(batches)) if compare else batches, loss))
                if critic is not None and isinstance(algorithm, PPO):
                    criticised.append(critic.step(batches, ppo.value_loss(algorithm)))
        tokens += sampled
        values = {**describe(trajectories, mesh.gather), **training_values(results, sampled), "tokens": tokens}
        values |= {**sampler_drift(kept, scores, mesh.gather), **extras, **critic_values(criticised)}
        check(values, drift_gate, step)
        if publish is not None:
            source.settle()
            publish(engine.steps)
        took = time.monotonic() - begun
        values |= {"time/step_s": took, "time/rollout_s": rolled - begun, "time/tokens_per_s": sampled / took}
        hooks.record(step, values, episodes, trajectories)
        hooks.save(step + 1, {"tokens": tokens})
    return tokens


def _batches(algorithm: Algorithm, rows: list[TrainSequence], budget: int, mesh: Mesh, hidden: int) -> list[PackedBatch]:
    """This data rank's microbatches of an update; where no rank has anything to learn from, a row without weights keeps them in step."""
    if not any(mesh.gather(bool(rows))):
        rows = [silent_row(algorithm)]
    return spread(rows, budget, mesh, hidden).batches


def with_reference(batches: list[PackedBatch], logprobs: list[torch.Tensor]) -> list[PackedBatch]:
    """Batches that know the reference model's log-probs."""
    return [replace(batch, ref_logprob_T=logprob) for batch, logprob in zip(batches, logprobs, strict=True)]


def describe(trajectories: Sequence[Trajectory], gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
    """Reward statistics over all ranks; Invalid samples are counted and kept out."""
    rewards = [t.reward for t in trajectories if not isinstance(t.reward, Invalid)]
    everywhere = gather((rewards, len(trajectories) - len(rewards)))
    values = [r for part, _ in everywhere for r in part]
    estimate = mean(values)
    equal = len(set(values)) <= 1  # the mean of equal numbers may differ from them by rounding, which is no spread
    spread = 0.0 if equal else (sum((v - estimate.value) ** 2 for v in values) / max(len(values) - 1, 1)) ** 0.5
    return {
        "reward/mean": estimate.value,
        "reward/std": spread,
        "reward/perfect": sum(v >= 1.0 for v in values) / max(len(values), 1),
        "invalid": sum(count for _, count in everywhere),
    }


def training_values(results: Sequence[StepResult], sampled: int) -> dict[str, Any]:
    """The engine's sums over a rollout's updates as means over the tokens that were trained on; the loss is the mean of the updates'."""
    sums = {name: sum(r.metrics[name] for r in results) for name in results[0].metrics}
    first = results[0].metrics
    trained = sums["pg_tokens"] or sums["tokens"]  # imitation has no policy term
    values = {
        "loss": sums["loss"] / len(results),
        "impossible_logprobs": sums["impossible"],
        "trained_share": trained / max(sampled, 1),
        "grad_norm": sum(r.grad_norm for r in results) / len(results),
        "lr": results[-1].lr,
    }
    if trained:  # what was not measured has no value, not the value 0
        values["entropy"] = sums["entropy"] / trained
        values["clip_fraction"] = (sums["clipped_low"] + sums["clipped_high"]) / trained
    begun = first["pg_tokens"] or first["tokens"]
    if begun and "drift" in first:  # sampler against trainer: later updates have moved away from what was sampled, as they should
        values["logprob_drift/mean"] = first["drift"] / begun
    if trained and "reference_kl" in sums:
        values["kl"] = sums["reference_kl"] / trained
    return values


def require_finite(values: dict[str, Any], step: int) -> None:
    """Stop the run by the name of a number that is NaN or infinite."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise NumericsError(f"step {step}: {name} is {value}; the last checkpoint is good: lower the learning rate and start a new run")


def check(values: dict[str, Any], drift_gate: float, step: int) -> None:
    """Stop by name rather than train on numbers that cannot be right."""
    require_finite(values, step)
    if values["impossible_logprobs"]:
        raise NumericsError(
            f"step {step}: {values['impossible_logprobs']:.0f} log-probs lie above 0; the loss kernel or the weights are broken"
        )
    if values.get("logprob_drift/mean", 0.0) > drift_gate:
        drift = f"{values['logprob_drift/mean']:.4f}"
        raise NumericsError(f"step {step}: sampler and trainer log-probs differ by {drift} on average, above drift_gate = {drift_gate}")
