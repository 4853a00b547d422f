"""The RL loop: roll out, weigh, train, record. A `Trainer` is one stage; every rank has one and calls `run`.

The leader of each data rank rolls out and sends the trajectories to its peers; from then on all ranks do the same
things in the same order, since every engine call is collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..core.batch import PackedBatch
from ..core.engine import Engine, StepResult
from ..core.mesh import Mesh
from ..data.trajectory import Trajectory
from ..kernels.batch_invariant import batch_invariant
from . import algorithms, preparation
from .algorithms import common, ppo
from .algorithms.common import Scores
from .algorithms.config import PPO, Algorithm
from .loop_settings import LoopSettings
from .objective import logprob_score, make_loss
from .rollout.ahead import Ahead
from .rollout.episodes import rollout
from .rollout.resample import Played, take_with_republish
from .rollout.sampler import Sampler, SamplingParams
from .step_record import check, describe, training_values


class Trainer:
    """RL of one policy. A subclass provides the episodes of a step and the reference model, and may record, save and
    publish.
    """

    can_refill = False  # whether `more_episodes` returns any

    def __init__(
        self,
        engine: Engine,
        sampler: Sampler,
        algorithm: Algorithm,
        params: SamplingParams,
        mesh: Mesh,
        settings: LoopSettings,
        critic: Engine | None = None,
    ) -> None:
        preparation.require_critic(algorithm, critic)
        self.engine, self.sampler, self.algorithm, self.params, self.mesh = engine, sampler, algorithm, params, mesh
        self.settings, self.critic = settings, critic
        self.loss = make_loss(algorithms.settings(algorithm, params.temperature))
        self.refilled: list[Trajectory] = []  # sampled in the last step in place of groups without a signal

    # What a subclass provides.

    def episodes(self, step: int) -> list[Any]:
        """This data rank's episodes of a step, whole groups only."""
        raise NotImplementedError

    def more_episodes(self, step: int, number: int) -> list[Any]:
        """Fresh episodes in place of groups without a signal, for an algorithm with refills."""
        raise NotImplementedError

    def play(self, sampler: Sampler, episodes: list[Any], seed: int) -> list[Trajectory]:
        """Play episodes to their end."""
        return rollout(sampler, episodes, self.params, seed)

    def reference(self, batches: list[PackedBatch]) -> list[torch.Tensor]:
        """Log-probs under the weights that the stage started from."""
        raise NotImplementedError

    def validate(self, step: int) -> dict[str, float]:
        """Evaluate the weights after `step` steps, before they are trained further; the result is recorded."""
        return {}

    def publish(self, version: int) -> None:
        """Send the new weights to a sampler that has a copy of its own."""

    def rest(self) -> dict[str, float]:
        """Tell the sampler to free the device for the trainer; what it returns is recorded."""
        return {}

    def trained(self, kept: Sequence[Trajectory]) -> None:
        """Called with the trajectories that a step was trained on."""

    def record(
        self, step: int, values: dict[str, Any], episodes: Sequence[Any], trajectories: Sequence[Trajectory]
    ) -> None:
        """Record a step's values. Only leaders have the episodes."""

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save when due; a request to stop leaves the loop from here, so checkpoints always fall between rollouts."""

    # The loop.

    def run(self, steps: range, tokens: int = 0) -> int:
        """Train for `steps`; returns the number of sampled tokens, `tokens` of earlier steps included."""
        refills = preparation.wants_refills(self.algorithm, self.can_refill, self.settings.ahead)
        # a replay does not stream: its rollouts exist already
        ahead = self.settings.ahead if hasattr(self.sampler, "submit") else 0
        source = Ahead(self._begin, steps, ahead, self.settings.rollout_deadline_s)
        self.publish(self.engine.steps)
        for step in steps:
            if self.mesh.is_leader:
                source.reach(step)
            extras = self.validate(step)
            start = time.monotonic()
            episodes, trajectories = self._take(source, step)
            kept, extra = preparation.keep_enough(
                self.algorithm, trajectories, partial(self._refill, step) if refills else None, self.mesh.gather
            )
            extras |= self.rest()
            rolled = time.monotonic()
            sampled = sum(self.mesh.gather(common.action_tokens([*trajectories, *extra])))
            tokens += sampled
            version, scores = self.engine.steps, self._score(kept)
            results, criticised = self._update(step, kept, scores)
            values = {**describe(trajectories, self.mesh.gather), **training_values(results, sampled), "tokens": tokens}
            if refills:
                values["invalid"] += sum(self.mesh.gather(sum(not common.is_valid(t) for t in extra)))
            preparation.add_drift(values, kept, scores, version, self.settings.ahead, self.mesh.gather)
            values |= {**extras, **preparation.critic_values(criticised)}
            check(values, self.settings.drift_gate, step + 1)
            self.trained(kept)
            self.publish(self.engine.steps)
            took = time.monotonic() - start
            values |= {"time/step_s": took, "time/rollout_s": rolled - start, "time/tokens_per_s": sampled / took}
            self.refilled = extra
            self.record(step, values, episodes, trajectories)
            self.save(step + 1, {"tokens": tokens})
        return tokens

    def _begin(self, step: int) -> Callable[[], tuple[list[Any], list[Trajectory]]]:
        episodes = self.episodes(step)
        return lambda: (episodes, self.play(self.sampler, episodes, self.settings.seed))

    def _take(self, source: Ahead[Any], step: int) -> tuple[list[Any], list[Trajectory]]:
        """The episodes of a step on leaders, and its trajectories on all ranks; checks their staleness and validity."""
        take, publish = partial(source.take, step), partial(self.publish, self.engine.steps)
        episodes, trajectories = take_with_republish(self.mesh, self.sampler, take, publish, f"step {step + 1}")
        preparation.check_staleness(trajectories, self.engine.steps, self.settings.ahead * self.settings.updates)
        preparation.require_valid(trajectories, self.settings.max_invalid_share, self.mesh.gather, f"step {step + 1}")
        return episodes, trajectories

    def _refill(self, step: int, number: int) -> list[Trajectory]:
        def take() -> Played:
            fresh = self.more_episodes(step, number)
            return fresh, self.play(self.sampler, fresh, self.settings.seed)

        publish, where = partial(self.publish, self.engine.steps), f"step {step + 1}, refill {number + 1}"
        _, played = take_with_republish(self.mesh, self.sampler, take, publish, where)
        preparation.require_valid(played, self.settings.max_invalid_share, self.mesh.gather, where)
        return played

    def _score(self, kept: list[Trajectory]) -> Scores:
        """Scores before the first update, which all updates of a rollout are compared with."""
        scorers = {"reference": self._reference, "policy": self._policy, "values": self._values}
        needed = algorithms.needs(self.algorithm)
        return preparation.score_rows(
            needed, kept, scorers, self.settings.microbatch_tokens, self.mesh, self.engine.device
        )

    def _policy(self, batches: list[PackedBatch]) -> list[torch.Tensor]:
        # as the sampler did
        with batch_invariant(getattr(getattr(self.sampler, "inner", self.sampler), "batch_invariant", False)):
            return [r["logprob"] for r in self.engine.score(batches, logprob_score(self.params.temperature))]

    def _reference(self, batches: list[PackedBatch]) -> list[torch.Tensor]:
        return self.reference([batch.without_experts() for batch in batches])

    def _values(self, batches: list[PackedBatch]) -> list[torch.Tensor]:
        own = [batch.without_experts() for batch in batches]
        return [r["value"] for r in self.critic.score(own, ppo.value_score)] if self.critic else []

    def _update(self, step: int, kept: list[Trajectory], scores: Scores) -> tuple[list[StepResult], list[StepResult]]:
        """The optimizer steps of policy and critic on one rollout."""
        rows = algorithms.prepare(self.algorithm, kept, scores, self.mesh.gather)
        every = self.settings.kl_every
        compare = scores.reference is None and every > 0 and step % every == 0
        results: list[StepResult] = []
        criticised: list[StepResult] = []
        for _ in range(self.settings.epochs):
            for part in preparation.minibatches(
                self.algorithm, rows, kept, self.settings.minibatches, self.mesh.gather
            ):
                batches = preparation.microbatches(
                    self.algorithm, part, self.settings.microbatch_tokens, self.mesh, self.engine.build.width
                )
                compared = preparation.with_reference(batches, self._reference(batches)) if compare else batches
                results.append(self.engine.step(compared, self.loss))
                if self.critic is not None and isinstance(self.algorithm, PPO):
                    own = [batch.without_experts() for batch in batches]
                    criticised.append(self.critic.step(own, ppo.value_loss(self.algorithm)))
        return results, criticised
