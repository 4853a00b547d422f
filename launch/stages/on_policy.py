"""RL as a stage of a recipe: two engines, resumed, journaled, watched, recorded and saved; it ends early when a
budget is spent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.batch import PackedBatch
from ...core.progress import Progress, say
from ...core.rng import fold
from ...data.trajectory import Trajectory
from ...rl.algorithms import needs
from ...rl.evaluation import picture
from ...rl.loop import Trainer
from ...rl.loop_settings import LoopSettings
from ...rl.objective import logprob_score
from ...rl.rollout.sampler import SamplingParams
from ..job import Job, log
from ..settings.base import Lora, OnPolicy, needs_reference
from .common import Checkpoints, build_engine
from .session import Session

VALIDATION = 0x76616C  # validation draws other random numbers than training


class _Spent(Exception):
    """The budget is used up, and the stage has saved."""


class StageTrainer(Trainer):
    """The trainer of an RL stage. A subclass gives its episodes, and says what the record, the report and the
    terminal show of them.
    """

    can_refill = True
    free_text: bool = True  # length and repetition of answers are watched
    shows_turns: bool = True  # the report shows episodes turn by turn
    stage: OnPolicy

    def __init__(
        self, stage: OnPolicy, job: Job, params: SamplingParams, microbatch_tokens: int, lora: Lora | None = None
    ) -> None:
        job.mesh.require_even(stage.prompts_per_step, f"stages: {stage.name}.prompts_per_step")
        self.stage, self.job = stage, job
        engine = build_engine(job, stage.optimizer, stage.init, lora)
        self.frozen = build_engine(job, None, stage.init) if needs_reference(stage) else None
        self.checkpoints = Checkpoints(job, stage.name, stage.checkpoint_every, stage.steps, stage.checkpoints)
        self.start, kept = self.checkpoints.resume(
            engine, beside=("critic",) if "values" in needs(stage.algorithm) else ()
        )
        self.counts = {name: kept.get(name, 0) for name in self.counted()}
        self.done = {"steps": self.start, "tokens": kept.get("tokens", 0)}
        self.progress_line = Progress(stage.name, stage.steps, start=self.start, speak=job.mesh.is_main)
        settings = LoopSettings(
            microbatch_tokens=microbatch_tokens,
            drift_gate=stage.drift_gate,
            seed=fold(job.recipe.seed, 2),
            kl_every=stage.rollouts_every if stage.rollouts.report_kl else 0,
            minibatches=stage.updates_per_rollout,
            epochs=stage.epochs_per_rollout,
            ahead=stage.rollouts.ahead,
            rollout_deadline_s=stage.rollouts.step_s,
            max_invalid_share=stage.rollouts.max_invalid_share,
        )
        self.issued = self.start
        self.session = Session(job, stage.name, engine, stage.rollouts, self.start, kept, settings.updates)
        try:
            critic = self.session.with_critic(stage.algorithm, stage.critic, stage.init, self.checkpoints, self.start)
            super().__init__(engine, self.session.sampler, stage.algorithm, params, job.mesh, settings, critic)
        except BaseException:
            self.session.close()
            raise

    # What a subclass says.

    def deal(self, number: int) -> list[Any]:
        """This data rank's episodes of the so many-th step's worth of prompts, all samples of each."""
        raise NotImplementedError

    def held_back(self) -> list[Any] | None:
        """Episodes that no step trains on, for validation; None where the stage has none."""
        return None

    def turns(self, episode: Any) -> list[dict[str, Any]]:
        """An episode as the report shows it."""
        return []

    def progress(self, values: dict[str, Any]) -> str:
        """The values of a step in a few words."""
        return f"reward {values['reward/mean']:.3f}"

    def measure(self, step: int, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        """Further values of a step, on every rank; it may add to `counts`."""
        return {}

    def counted(self) -> Sequence[str]:
        """Names of the counts that are kept in checkpoints."""
        return ()

    def ended_by(self) -> str | None:
        """The setting that ends the stage after this step, in words; None where it goes on."""
        return None

    # The loop's surroundings.

    def train(self) -> dict[str, Any]:
        """Train to the last step or until the budget is spent; steps, gradient tokens and counts come back."""
        if self.start and self.ended_by():
            self.checkpoints.last = self.start  # killed between the last save and the end
        try:
            self.run(range(self.start, self.checkpoints.last), self.done["tokens"])
        except _Spent:
            pass
        finally:
            self.session.close()
        if self.mesh.is_main and (steps := self.done["steps"]) < self.stage.steps:
            line = f"{self.stage.name}: ended after {steps} of {self.stage.steps} steps: {self.ended_by()}"
            log.info("%s", line)
            say(line)
        self.session.write_lengths(self.settings.seed)
        return {**self.done, **self.counts, **self.checkpoints.outcome()}

    def episodes(self, step: int) -> list[Any]:
        made = self.deal(step)
        if step >= self.issued:  # not when it is dealt again
            self.session.note("issued", step, {e.prompt_id for e in made})
            self.issued = step + 1
        return made

    def more_episodes(self, step: int, number: int) -> list[Any]:
        # prompts that no step has
        return self.deal(self.stage.steps + step * getattr(self.algorithm, "refills", 0) + number)

    def places(self, number: int) -> Sequence[int]:
        """This data rank's places of the so many-th step in the endless stream of prompts."""
        each = self.stage.prompts_per_step
        return self.mesh.share(range(number * each, (number + 1) * each))

    def reference(self, batches: list[PackedBatch]) -> list[torch.Tensor]:
        assert self.frozen is not None
        return [r["logprob"] for r in self.frozen.score(batches, logprob_score(self.stage.temperature))]

    def validate(self, step: int) -> dict[str, float]:
        seed = fold(self.settings.seed, VALIDATION)
        return self.session.validate(step, self.held_back, lambda sampler, episodes: self.play(sampler, episodes, seed))

    def trained(self, kept: Sequence[Trajectory]) -> None:
        if self.mesh.leads:
            self.session.trained(kept)

    def publish(self, version: int) -> None:
        if self.session.publish is not None:
            self.session.publish(version)

    def rest(self) -> dict[str, float]:
        return self.session.rest()

    def record(
        self, step: int, values: dict[str, Any], episodes: Sequence[Any], trajectories: Sequence[Trajectory]
    ) -> None:
        values = self.session.observe(
            step, values, trajectories, limit=self.params.max_new_tokens if self.free_text else None
        )
        values = values | self.measure(step, trajectories)
        if self.ended_by():
            self.checkpoints.last = step + 1
        if not self.mesh.is_main:
            return
        name = self.stage.name
        self.job.run.metrics.append(name, step + 1, values)
        if self.shows_turns and (step % self.stage.rollouts_every == 0 or step + 1 == self.checkpoints.last):
            self.job.run.write_rollouts(name, step + 1, picture(step + 1, episodes, trajectories, self.turns))
        self.progress_line.update(step + 1, self.progress(values))

    def save(self, step: int, state: dict[str, Any]) -> None:
        self.session.save(self.checkpoints, step, {**state, **self.counts})
        self.done.update(tokens=state["tokens"], steps=step)
        if step == self.checkpoints.last < self.stage.steps:
            raise _Spent
