"""What RL stages share around the loop: sampler, journal, alarms and critic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from ...core.config import OptimizerConfig
from ...core.engine import Engine
from ...data.trajectory import Role, Trajectory
from ...rl.algorithms import needs
from ...rl.algorithms.common import rows
from ...rl.algorithms.config import Algorithm
from ...rl.health import Health, sample_values
from ...rl.journal import Event, Journal, JournalSampler, JournalStream, ReplaySampler
from ...rl.preparation import require_valid
from ...rl.rollout.config import Rollouts
from ...rl.rollout.open import as_stream, open_sampler
from ...rl.rollout.resample import Played, take_with_republish
from ...rl.rollout.sampler import Sampler
from ...rl.rollout.stream import Stream
from ...rl.step_record import describe, lengths_table
from ..job import Job, log
from .common import Checkpoints, build_engine, step_folder


def tell_damage(job: Job, found: Sequence[str]) -> None:
    """Warn of the lines of journals that every rank found damaged. Collective."""
    for damage in chain.from_iterable(job.mesh.gather_all(found)):
        job.warn(f"{damage}; the line is dropped, and what it held is sampled again")


class Session:
    """One stage's rollouts: the sampler, their journal, and the alarms that watch them."""

    def __init__(
        self,
        job: Job,
        stage: str,
        engine: Engine,
        settings: Rollouts,
        start: int,
        extra: dict[str, Any],
        updates: int = 1,
    ) -> None:
        folder = job.stage_folder(stage)
        self.job, self.settings, self.engine, self.ahead = job, settings, engine, settings.ahead
        self.staleness = settings.ahead * updates  # optimizer steps that a rollout may lag behind
        self.journal = Journal(folder / "journal", job.mesh.data_rank)
        streamed = settings.streamed
        newest = engine.steps if streamed else None  # later weights will differ, as sampling ahead depends on timing
        found = self.journal.resume(start, newest) if job.mesh.is_leader else []
        # also drop what ranks of an earlier, larger layout wrote beyond the checkpoint
        for rank in sorted(self.journal.ranks()) if job.mesh.is_main else ():
            if rank >= job.mesh.data_size:
                found += Journal(self.journal.folder, rank).resume(start, newest)
        tell_damage(job, found)
        self.stage, self.lengths = stage, Counter[int]()
        self.others: dict[str, Engine] = {}
        self.health = Health(settings.health)
        if "health" in extra:
            self.health.load(extra["health"])
        if settings.replay is not None:
            self.sampler: Sampler = ReplaySampler(Path(settings.replay), settings.replay_routing)
            self.publish, self.close, self.rest = None, lambda: None, dict
            return
        opened = open_sampler(
            settings.sampler,
            engine,
            job.model,
            folder / "sampler",
            mesh=job.mesh,
            ahead=settings.ahead,
            notes=settings.replay_routing and job.model.experts > 0,
        )
        if streamed:
            opened = as_stream(opened, settings.ahead > 0, settings.step_s)
        inner, resolved = opened.sampler, {"version": lambda: engine.steps, "staleness": self.staleness}
        if isinstance(inner, Stream):
            self.sampler = JournalStream(inner, self.journal, **resolved)
        else:
            self.sampler = JournalSampler(inner, self.journal, **resolved)
        self.publish, self.close, self.rest = opened.publish, opened.close, opened.rest or dict

    def validate(
        self,
        step: int,
        episodes: Callable[[], list[Any]],
        play: Callable[[Sampler, list[Any]], list[Trajectory]],
    ) -> dict[str, float]:
        """Every `validation.every` steps: rewards of episodes that are set aside for validation."""
        every = self.settings.validation.every
        # the journal is only for training
        inner = self.sampler.inner if isinstance(self.sampler, JournalSampler) else None
        if inner is None or not every or step % every:
            return {}
        mesh, where = self.job.mesh, f"validation after {step} steps"
        publish = partial(self.publish, self.engine.steps) if self.publish is not None else lambda: None

        def take() -> Played:
            fresh = episodes()
            return fresh, play(inner, fresh)

        _, played = take_with_republish(mesh, inner, take, publish, where)
        require_valid(played, self.settings.max_invalid_share, mesh.gather, where)
        values = {
            f"validation/{key.removeprefix('reward/')}": value for key, value in describe(played, mesh.gather).items()
        }
        if mesh.is_main:
            log.info("%d steps: validation reward %.3f", step, values["validation/mean"])
        return values | {"validation/steps": float(step)}

    def observe(
        self, step: int, values: dict[str, Any], trajectories: Sequence[Trajectory], limit: int | None
    ) -> dict[str, Any]:
        """Note the step's prompts as trained and sound the alarms, on every rank. With `limit`, the most tokens of an
        answer of free text, its length and repetition are watched too. Returns what to record."""
        if limit is not None:
            answers = [  # of one turn each: a sequence may hold several
                tuple(token for token, _ in span)
                for _, s in rows(trajectories)
                for role, span in groupby(zip(s.ids, s.roles, strict=True), itemgetter(1))
                if role == Role.ACTION
            ]
            parts = self.job.mesh.gather((sample_values(answers, limit), len(answers)))
            total = max(sum(n for _, n in parts), 1)
            values = values | {key: sum(v[key] * n for v, n in parts) / total for key in parts[0][0]}
        for alarm in self.health.observe(step + 1, values):
            values = values | {f"alarm/{alarm.name}": 1.0}
            if self.job.mesh.is_main:
                log.warning("step %d: alarm %s: %s", alarm.step, alarm.name, alarm.message)
        self.note("trained", step, {t.prompt_id for t in trajectories})
        return values

    def trained(self, kept: Sequence[Trajectory]) -> None:
        """Count the lengths of the answers that a step was trained on."""
        for _, sequence in rows(kept):
            spans = groupby(sequence.roles)
            self.lengths.update(len([*span]) for role, span in spans if role == Role.ACTION)

    def write_lengths(self, seed: int) -> None:
        """Write a table of the lengths of sampled and trained answers, if sampling ran ahead of training: long answers
        must not be missing. Every rank calls this.
        """
        if not isinstance(self.sampler, JournalStream):
            return
        parts = self.job.mesh.gather((self.sampler.lengths[seed], self.lengths))
        both = [sum(counts, Counter()) for counts in zip(*parts, strict=True)]
        if self.job.mesh.is_main and all(both):
            self.job.run.write_result(f"{self.stage}-lengths", lengths_table(self.stage, *both))

    def note(self, event: Event, step: int, prompts: Iterable[int] = ()) -> None:
        """Write an event for this data rank's prompts, once."""
        if self.job.mesh.is_leader:
            self.journal.note(event, step, sorted(prompts))

    def with_critic(
        self, algorithm: Algorithm, optimizer: OptimizerConfig | None, init: str, checkpoints: Checkpoints, start: int
    ) -> Engine | None:
        """The critic, if the algorithm has one, resumed with the policy; from then on it is saved with it."""
        if optimizer is None or "values" not in needs(algorithm):
            return None
        critic = build_engine(self.job, optimizer, init, value_head="scalar")
        if start:
            critic.load(step_folder(checkpoints.beside("critic"), start))
        self.others["critic"] = critic
        return critic

    def save(self, checkpoints: Checkpoints, step: int, state: dict[str, Any]) -> None:
        """The checkpoint when it is time, with the alarms' memory in it; once it is there, samples that no resume can
        ask for are forgotten.
        """
        oldest = self.engine.steps - self.staleness

        def saved() -> None:
            self.note("saved", step)
            if self.job.mesh.is_leader and not self.settings.keep_samples:
                self.journal.prune(oldest)

        checkpoints.save(self.engine, step, {**state, "health": self.health.state()}, self.others, saved)
