"""RL as a stage of a recipe: resumed, journaled, watched, recorded and saved; it ends early when a budget is spent."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ...core.batch import PackedBatch
from ...core.errors import ConfigError
from ...core.progress import Progress, say
from ...core.rng import fold
from ...data.trajectory import Trajectory
from ...rl.algorithms import needs
from ...rl.evaluation import picture
from ...rl.loop import Trainer
from ...rl.loop_settings import LoopSettings
from ...rl.objective import logprob_score
from ...rl.preparation import require_valid
from ...rl.rollout.resample import Played, take_with_republish
from ...rl.rollout.sampler import Sampler
from ...rl.tasks import Tasks
from ..job import Job, log
from ..settings.base import needs_reference
from ..settings.verbs import Reinforce
from .common import Checkpoints, build_engine, split_cut
from .session import Session

VALIDATION = 0x76616C  # key of validation's random numbers, which differ from training's


class _Spent(Exception):
    """The budget is used up, and the stage has saved."""


def actions_of(job: Job, stage: Reinforce, name: str) -> int:
    """The number of actions that an earlier stage took."""
    outcome = job.outcome(name)
    if "actions" not in outcome:
        raise ConfigError(f"stages: {stage.name}.counting: stage '{name}' counts no actions; name collect stages")
    return outcome["actions"]


class StageTrainer(Trainer):
    """The trainer of an RL stage on the tasks of an environment, with what the record, the report and the terminal show
    of their episodes.
    """

    def __init__(self, stage: Reinforce, job: Job, tasks: Tasks) -> None:
        self.stage, self.job, self.tasks, self.train_tasks = stage, job, tasks, tasks.of("train")
        self.cut = split_cut(tasks.numbers(job.recipe.seed), stage.rollouts.validation, stage.name)[1]
        self.order = tasks.order(job.recipe.seed, without=self.cut)
        self.can_refill = stage.actions is None  # a budget counts the actions of a step's own episodes
        self.before = sum(actions_of(job, stage, name) for name in stage.counting)
        params = tasks.params(stage.max_new_tokens, stage.temperature)
        engine = build_engine(job, stage.optimizer, stage.init, stage.lora)
        self.frozen = build_engine(job, None, stage.init) if needs_reference(stage) else None
        self.checkpoints = Checkpoints(job, stage.name, stage.checkpoint_every, stage.steps, stage.checkpoints)
        self.start, kept = self.checkpoints.resume(
            engine, beside=("critic",) if "values" in needs(stage.algorithm) else ()
        )
        self.counts = {name: kept.get(name, 0) for name in self.counted()}
        self.done = {"steps": self.start, "tokens": kept.get("tokens", 0)}
        self.progress_line = Progress(stage.name, stage.steps, start=self.start, speak=job.mesh.is_main)
        settings = LoopSettings(
            microbatch_tokens=stage.microbatch_tokens,
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
        if step >= self.issued:  # not again when an episode is repeated
            self.session.note("issued", step, {e.prompt_id for e in made})
            self.issued = step + 1
        return made

    def more_episodes(self, step: int, number: int) -> list[Any]:
        # prompt numbers beyond those of all steps
        return self.deal(self.stage.steps + step * getattr(self.algorithm, "refills", 0) + number)

    def reference(self, batches: list[PackedBatch]) -> list[torch.Tensor]:
        assert self.frozen is not None
        return [r["logprob"] for r in self.frozen.score(batches, logprob_score(self.stage.temperature))]

    def validate(self, step: int) -> dict[str, float]:
        seed = fold(self.settings.seed, VALIDATION)
        return self.session.validate(
            step, self.validation_episodes, lambda sampler, episodes: self.play(sampler, episodes, seed)
        )

    def trained(self, kept: Sequence[Trajectory]) -> None:
        if self.mesh.is_leader:
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
            step, values, trajectories, limit=self.params.max_new_tokens if self.tasks.free_text else None
        )
        values = values | self.measure(step, trajectories)
        if self.ended_by():
            self.checkpoints.last = step + 1
        if not self.mesh.is_main:
            return
        name = self.stage.name
        self.job.run.metrics.append(name, step + 1, values)
        if self.tasks.shows_turns and (step % self.stage.rollouts_every == 0 or step + 1 == self.checkpoints.last):
            self.job.run.write_rollouts(name, step + 1, picture(step + 1, episodes, trajectories, self.tasks.shown))
        self.progress_line.update(step + 1, self.tasks.progress(values))

    def save(self, step: int, state: dict[str, Any]) -> None:
        self.session.save(self.checkpoints, step, {**state, **self.counts})
        self.done.update(tokens=state["tokens"], steps=step)
        if step == self.checkpoints.last < self.stage.steps:
            raise _Spent

    # The episodes.

    def deal(self, number: int) -> list[Any]:
        """This data rank's episodes of a step's share of the endless stream of prompts, all samples of each."""
        each, samples = self.stage.prompts_per_step, range(self.stage.samples_per_prompt)
        places = self.mesh.share(range(number * each, (number + 1) * each))
        asked = [(place, self.train_tasks[self.order(place)]) for place in places]
        return [self.tasks.episode(task, place, k) for place, task in asked for k in samples]

    def validation_episodes(self) -> list[Any]:
        """This data rank's episodes of the training tasks that are set aside for validation."""
        samples = range(self.stage.rollouts.validation.samples)
        return [self.tasks.episode(self.train_tasks[i], i, k) for i in self.mesh.share(self.cut) for k in samples]

    def play(self, sampler: Sampler, episodes: list[Any], seed: int) -> list[Trajectory]:
        return self.tasks.play(sampler, episodes, self.params, seed)

    def measure(self, step: int, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        """Values of a step to record besides the loop's own, on every rank; also counts the episodes."""
        if self.counts:
            parts = self.mesh.gather(self.tasks.tally([*trajectories, *self.refilled]))
            for name in self.counts:
                self.counts[name] += sum(part.get(name, 0) for part in parts)
        held_out = self.on_held_out_tasks(step + 1)
        return {**self.tasks.measures(trajectories, self.mesh.gather), **self.counts, **held_out}

    def on_held_out_tasks(self, step: int) -> dict[str, float]:
        """Scores on tasks of the test split, if the stage validates on them."""
        asked = self.stage.validation
        if asked is None or not (step % asked.every == 0 or step == self.stage.steps or self.ended_by()):
            return {}
        chosen = self.tasks.some(asked.prompts)
        true = self._played(chosen, asked.samples, step)
        scores = self.tasks.scores(true, asked.samples)
        values = {f"validation/{name}": value for name, value in scores.items()}
        if self.tasks.imagined_by is None:
            return values
        imagined = self._played([self.tasks.imagined(task) for task in chosen], asked.samples, step)
        name, score = next(iter(self.tasks.scores(imagined, asked.samples).items()))
        gap = score - scores[name]
        values |= {f"validation/imagined/{name}": score, "validation/gap": gap}
        if gap <= asked.max_gap:
            return values
        if self.mesh.is_main:
            log.warning(
                "step %d: alarm exploitation: success in imagination is %.3f above that in the true world, "
                "validation.max_gap is %.3g",
                *(step, gap, asked.max_gap),
            )
        self.counts["exploited"] += asked.on_gap == "stop"
        return values | {"alarm/exploitation": 1.0}

    def _played(self, tasks: Sequence[Any], samples: int, step: int) -> list[Trajectory]:
        """Play some tasks on all ranks together. As in training, servers that lost their weights get them again, and
        too many Invalid samples stop the run.
        """
        asked = [(i, task, k) for i, task in enumerate(tasks) for k in range(samples)]
        seed, where = fold(self.job.recipe.seed, 5, step), f"validation after {step} steps"

        def take() -> Played:
            episodes = [self.tasks.episode(task, i, k) for i, task, k in self.mesh.share(asked)]
            return episodes, self.play(self.sampler, episodes, seed)

        publish = partial(self.publish, self.engine.steps)
        _, played = take_with_republish(self.mesh, self.sampler, take, publish, where)
        require_valid(played, self.stage.rollouts.max_invalid_share, self.mesh.gather, where)
        if getattr(self.stage.rollouts.sampler, "colocated", False):
            # a checkpoint may follow: give the trainer its memory back, and a sampler that slept its weights
            self.rest()
            publish()
        return [t for part in self.mesh.gather(played) for t in part]

    def counted(self) -> tuple[str, ...]:
        """Names of the counts that checkpoints keep."""
        counted = self.tasks.counted or (("actions",) if self.stage.actions is not None else ())
        return (*counted, "exploited") if self.tasks.imagined_by is not None else counted

    def ended_by(self) -> str | None:
        """The setting that ends the stage after this step, in words: the budget of actions, or the limit on the gap
        between imagination and the true world. None if the stage continues.
        """
        budget = self.stage.actions
        if budget is not None and self.counts["actions"] + self.before >= budget:
            return f"actions = {budget} are used up"
        if self.counts.get("exploited", 0) and self.stage.validation is not None:
            return f"validation.on_gap is stop, and the gap was above max_gap = {self.stage.validation.max_gap:g}"
        return None
