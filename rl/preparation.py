"""Between rollout and step: which trajectories are trained on, what the models say of them, and what the record keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..core.engine import StepResult
from ..core.errors import NumericsError
from ..data.packing import TrainSequence, pack, unpack
from ..data.trajectory import Trajectory
from . import algorithms
from .algorithms import common, ppo
from .algorithms.common import Gather, Scores
from .algorithms.config import Algorithm
from .rollout.episodes import Episode, rollout
from .rollout.sampler import Sampler, SamplingParams


def score_rows(
    wanted: frozenset[str], trajectories: Sequence[Trajectory], scorers: dict[str, Callable[..., list[torch.Tensor]]], budget: int
) -> Scores:
    """What the algorithm asks of the models about every row, before the step."""
    rows = [TrainSequence.of(sequence) for _, sequence in common.rows(trajectories)]
    if not wanted or not rows:
        return Scores(**{name: [] for name in wanted})
    batches = pack(rows, budget=budget, pad=False)
    return Scores(**{name: list(unpack(batches, scorers[name](batches)).values()) for name in sorted(wanted)})


def keep_enough(
    algorithm: Algorithm,
    trajectories: list[Trajectory],
    refill: Callable[[int], list[Episode]] | None,
    sampler: Sampler,
    params: SamplingParams,
    seed: int,
    gather: Gather,
) -> tuple[list[Trajectory], list[Trajectory]]:
    """(kept, extra): the trajectories to train on, and what was sampled beyond the given ones.

    Where the algorithm allows refills, `refill(round)` gives fresh prompts in place of groups that were not kept.
    """
    wanted = len({t.prompt_id for t in trajectories})
    kept, extra = algorithms.keep(algorithm, trajectories, gather), []
    for number in range(getattr(algorithm, "refills", 0) if refill else 0):
        if len({t.prompt_id for t in kept}) >= wanted:
            break
        assert refill is not None
        fresh = rollout(sampler, refill(number), params, seed)
        extra += fresh
        kept = kept + algorithms.keep(algorithm, fresh, gather)
    enough = set(list(dict.fromkeys(t.prompt_id for t in kept))[:wanted])
    return [t for t in kept if t.prompt_id in enough], extra


def sampler_drift(trajectories: Sequence[Trajectory], scores: Scores, gather: Gather) -> dict[str, float]:
    """Where the trainer recomputed the log-probs, the drift is between those and the sampler's."""
    if scores.policy is None:
        return {}
    rows = zip(common.rows(trajectories), scores.policy, strict=True)
    gaps = [np.abs(np.asarray(s.logprobs) - logprobs)[common.action_mask(s) > 0] for (_, s), logprobs in rows]
    parts = gather((float(sum(g.sum() for g in gaps)), sum(len(g) for g in gaps)))
    return {"logprob_drift/mean": sum(total for total, _ in parts) / max(sum(count for _, count in parts), 1)}


def critic_values(result: StepResult) -> dict[str, float]:
    """The critic's step in the record; explained variance is left out where the returns do not vary."""
    sums = result.metrics
    explained = ppo.explained_variance(sums)
    count = max(sums["value_tokens"], 1)
    values = {
        "critic/loss": sums["value_loss"],
        "critic/clip_fraction": sums["value_clipped"] / count,
        "critic/grad_norm": result.grad_norm,
    }
    return values | ({"critic/explained_variance": explained} if math.isfinite(explained) else {})


def silent_row(algorithm: Algorithm, trajectories: Sequence[Trajectory]) -> TrainSequence:
    """A sequence without weights: where a rank has nothing left to learn from, it keeps the ranks in step."""
    sequence = next(s for t in trajectories for s in t.sequences)
    names = ["ce"] if algorithm.kind == "sft" else ["pg", "advantage"]
    names += ["value", "returns", "old_value"] if "values" in algorithms.needs(algorithm) else []
    zeros = np.zeros(len(sequence.ids), np.float32)
    logprobs = {} if algorithm.kind == "sft" else {"old_logprob": np.asarray(sequence.logprobs, np.float32)}
    return TrainSequence.of(sequence, **dict.fromkeys(names, zeros), **logprobs)


def check_staleness(trajectories: Sequence[Trajectory], version: int, bound: int) -> None:
    """Refuse rollouts by weights older than the bound, or newer than the trainer's."""
    for t in trajectories:
        for sequence in t.sequences:
            if not version - bound <= sequence.weight_version <= version:
                raise NumericsError(
                    f"prompt {t.prompt_id}: sampled by version {sequence.weight_version} of the weights, the trainer has {version} "
                    f"and allows {bound} behind; the sampler was not brought up to date"
                )
