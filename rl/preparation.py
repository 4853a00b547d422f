"""Between rollout and step: which trajectories are trained on, their scores by the models, and what is recorded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..core.batch import PackedBatch
from ..core.engine import StepResult
from ..core.errors import ConfigError, NumericsError, RolloutError
from ..core.mesh import Mesh
from ..data.balance import spread
from ..data.packing import WEIGHTS, TrainSequence
from ..data.trajectory import Invalid, Role, Trajectory
from . import algorithms
from .algorithms import common, ppo
from .algorithms.common import Gather, Scores
from .algorithms.config import Algorithm


def score_rows(
    wanted: frozenset[str],
    trajectories: Sequence[Trajectory],
    scorers: dict[str, Callable[..., list[torch.Tensor]]],
    budget: int,
    mesh: Mesh,
    device: torch.device,
) -> Scores:
    """The scores of every row that the algorithm needs before the step; advantages are computed on `device`."""
    rows = [TrainSequence.of(sequence) for _, sequence in common.rows(trajectories)]
    if not wanted or not any(mesh.gather(bool(rows))):
        return Scores(**{name: [] for name in wanted}, device=device)
    shared = spread(rows, budget, mesh)
    return Scores(device=device, **{name: shared.to_owners(scorers[name](shared.batches)) for name in sorted(wanted)})


def keep_enough(
    algorithm: Algorithm,
    trajectories: list[Trajectory],
    refill: Callable[[int], list[Trajectory]] | None,
    gather: Gather,
) -> tuple[list[Trajectory], list[Trajectory]]:
    """(kept, extra): the trajectories to train on, and those sampled in addition to the given ones.

    Where the algorithm allows refills, `refill(round)` samples fresh prompts in place of groups that were not kept. All
    data ranks take part in a round, or none.
    """
    valid = [t for t in trajectories if t.prompt_id >= 0]  # the others are Invalid and belong to no group
    wanted = len({t.prompt_id for t in valid})
    kept, extra = algorithms.keep(algorithm, valid, gather), []
    for number in range(getattr(algorithm, "refills", 0) if refill else 0):
        if not any(gather(len({t.prompt_id for t in kept}) < wanted)):
            break
        assert refill is not None
        fresh = refill(number)
        extra += fresh
        kept = kept + algorithms.keep(algorithm, fresh, gather)
    enough = set(list(dict.fromkeys(t.prompt_id for t in kept))[:wanted])
    return [t for t in kept if t.prompt_id in enough], extra


def minibatches(
    algorithm: Algorithm, rows: list[TrainSequence], trajectories: Sequence[Trajectory], count: int, gather: Gather
) -> list[list[TrainSequence]]:
    """This data rank's rows of every mini-batch. Groups stay whole and are ordered by prompt over all ranks, so that a
    mini-batch does not depend on the layout; each is weighed as a batch of its own. Groups without a valid sample are
    left out, and there are at most as many mini-batches as groups: an empty one would step by momentum alone."""
    if count == 1:
        return [rows]
    prompts = sorted({p for part in gather({t.prompt_id for t in trajectories if common.is_valid(t)}) for p in part})
    if (count := min(count, len(prompts))) <= 1:
        return [rows]
    part_of = {prompt: place * count // len(prompts) for place, prompt in enumerate(prompts)}
    whole = _sizes(trajectories, gather)
    made = []
    for number in range(count):
        sizes = _sizes([t for t in trajectories if part_of.get(t.prompt_id) == number], gather)
        scale = {name: np.float32(whole[name] / max(size, 1)) for name, size in sizes.items()}
        chosen = [row for row in rows if part_of[trajectories[row.source].prompt_id] == number]
        made.append([_scaled(row, algorithm, scale) for row in chosen])
    return made


def _sizes(trajectories: Sequence[Trajectory], gather: Gather) -> dict[str, int]:
    parts = gather((common.action_tokens(trajectories), len(common.rows(trajectories))))
    return {"tokens": sum(tokens for tokens, _ in parts), "sequences": sum(rows for _, rows in parts)}


def _scaled(row: TrainSequence, algorithm: Algorithm, scale: dict[str, np.float32]) -> TrainSequence:
    """Rescale the row's weights from the whole rollout's total to the mini-batch's. Imitation and values count
    tokens.
    """
    policy = scale["tokens" if getattr(algorithm, "aggregate", "token") == "token" else "sequences"]
    factors = {name: scale["tokens"] if name in ("ce", "value") else policy for name in WEIGHTS}
    return replace(
        row, **{name: getattr(row, name) * factor for name, factor in factors.items() if getattr(row, name) is not None}
    )


def add_drift(
    values: dict[str, Any], trajectories: Sequence[Trajectory], scores: Scores, version: int, ahead: int, gather: Gather
) -> None:
    """Add the drift between sampler and trainer to a step's values; with rollouts ahead also the age of the tokens."""
    age = staleness(trajectories, version, gather) if ahead else {}
    if age.get("staleness/max") and "logprob_drift/mean" in values:  # caused by older weights, not by a fault
        values["logprob_drift/stale"] = values.pop("logprob_drift/mean")
    values |= {**sampler_drift(trajectories, scores, version, gather), **age}


def sampler_drift(trajectories: Sequence[Trajectory], scores: Scores, version: int, gather: Gather) -> dict[str, float]:
    """The drift between the sampler's log-probs and those the trainer recomputed. Tokens sampled by older weights are
    counted separately: they differ because the weights do.
    """
    if scores.policy is None:
        return {}
    gaps: dict[str, list[np.ndarray]] = {"mean": [], "stale": []}
    for (_, s), logprobs in zip(common.rows(trajectories), scores.policy, strict=True):
        gap, sampled = np.abs(np.asarray(s.logprobs) - logprobs), common.action_mask(s) > 0
        fresh = np.asarray(s.token_versions) == version
        gaps["mean"].append(gap[sampled & fresh])
        gaps["stale"].append(gap[sampled & ~fresh])
    values = {}
    for name, found in gaps.items():
        parts = gather((float(sum(g.sum() for g in found)), sum(len(g) for g in found)))
        count = sum(n for _, n in parts)
        if count or name == "mean":
            values[f"logprob_drift/{name}"] = sum(total for total, _ in parts) / max(count, 1)
    return values


def critic_values(results: Sequence[StepResult]) -> dict[str, float]:
    """The critic's steps of a rollout in the record; explained variance is left out where the returns do not vary."""
    if not results:
        return {}
    sums = {name: sum(r.metrics[name] for r in results) for name in results[0].metrics}
    explained = ppo.explained_variance(sums)
    count = max(sums["value_tokens"], 1)
    values = {
        "critic/loss": sums["value_loss"] / len(results),
        "critic/clip_fraction": sums["value_clipped"] / count,
        "critic/grad_norm": sum(r.grad_norm for r in results) / len(results),
    }
    return values | ({"critic/explained_variance": explained} if math.isfinite(explained) else {})


def require_valid(trajectories: Sequence[Trajectory], most: float, gather: Gather, what: str) -> None:
    """Stop the run if more than the share `most` of all ranks' samples is Invalid: the rest says little of the
    policy.
    """
    reasons = [t.reward.reason for t in trajectories if isinstance(t.reward, Invalid)]
    parts = gather((len(trajectories), reasons))
    total, failed = sum(count for count, _ in parts), Counter(reason for _, part in parts for reason in part)
    if failed.total() > most * total:
        raise RolloutError(
            f"{what}: {failed.total()} of {total} samples are Invalid, above rollouts.max_invalid_share = {most:g}; "
            f"the commonest reason: {failed.most_common(1)[0][0]}"
        )


def microbatches(
    algorithm: Algorithm, rows: list[TrainSequence], budget: int, mesh: Mesh, width: int
) -> list[PackedBatch]:
    """This data rank's microbatches of an update. If no rank has anything to learn from, a row of weight 0 keeps the
    ranks in step.
    """
    return spread(rows if any(mesh.gather(bool(rows))) else [_silent_row(algorithm)], budget, mesh, width).batches


def _silent_row(algorithm: Algorithm) -> TrainSequence:
    """A sequence of weight 0."""
    names = ["ce"] if algorithm.kind == "sft" else ["pg", "advantage", "old_logprob"]
    names += ["value", "returns", "old_value"] if "values" in algorithms.needs(algorithm) else []
    # the KL of the other mini-batches is measured here too, as 0
    in_loss = getattr(algorithm, "kl_in", None) == "loss" and "reference" in algorithms.needs(algorithm)
    names += ["kl", "ref_logprob"] if in_loss else []
    return replace(TrainSequence(np.zeros(2, np.int64)), **{name: np.zeros(2, np.float32) for name in names})


def require_critic(algorithm: Algorithm, critic: Any) -> None:
    """Refuse an algorithm that needs values in a stage without a critic."""
    if "values" in algorithms.needs(algorithm) and critic is None:
        raise ConfigError(
            f"algorithm: {algorithm.kind} needs a critic, which this stage does not train; choose one without "
            "(grpo, rloo)"
        )


def wants_refills(algorithm: Algorithm, possible: bool, ahead: int) -> bool:
    """Whether groups without a signal are replaced."""
    refills = possible and getattr(algorithm, "refills", 0) > 0
    if ahead and refills:
        raise ConfigError(
            "ahead: refills must be sampled by the weights of their own step; set ahead: 0 or algorithm.refills: 0"
        )
    return refills


def check_staleness(trajectories: Sequence[Trajectory], version: int, bound: int) -> None:
    """Refuse rollouts whose weights are older than the bound, or newer than the trainer's."""
    for t in trajectories:
        for sequence in t.sequences:
            if not version - bound <= sequence.weight_version <= version:
                raise NumericsError(
                    f"prompt {t.prompt_id}: sampled by version {sequence.weight_version} of the weights, the trainer "
                    f"has {version} and allows {bound} behind; the sampler was not brought up to date"
                )


def staleness(trajectories: Sequence[Trajectory], version: int, gather: Gather) -> dict[str, float]:
    """By how many optimizer steps the weights of each sampled token are behind."""
    parts = gather(
        [
            [version - v for v, role in zip(s.token_versions, s.roles, strict=True) if role == Role.ACTION]
            for _, s in common.rows(trajectories)
        ]
    )
    ages = [age for part in parts for row in part for age in row]
    return {"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))} if ages else {}


def with_reference(batches: list[PackedBatch], logprobs: list[torch.Tensor]) -> list[PackedBatch]:
    """The batches with the reference model's log-probs filled in."""
    return [replace(batch, ref_logprob_T=logprob) for batch, logprob in zip(batches, logprobs, strict=True)]
