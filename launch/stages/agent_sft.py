"""Imitation of self-play turns: SPA's first stage, its ablations, or a warm-up of the answer's format."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...core.errors import ConfigError
from ...core.rng import shuffled
from ...data.balance import spread
from ...data.packing import TrainSequence, pack
from ...data.shards import ShardSet
from ...data.trajectory import Role
from ...rl.objective import logprob_score
from ..job import Job
from ..settings.agent import AgentSupervised
from .agent import HELD_OUT, TRAIN
from .common import build_engine
from .fitting import Portion, fit

HELD_OUT_MOST = 512  # held-out turns that are scored at the end


class Lessons:
    """The turns of an agent-play stage, read once: they are small beside a model."""

    def __init__(self, job: Job, data: str, part: str) -> None:
        folder = job.stage_folder(data) / part
        shards = ShardSet(folder, fields=["tokens.npy", "roles.npy"]) if any(folder.glob("*.tar")) else ()
        read = [shards[i] for i in range(len(shards))]
        self.ids = [np.asarray(sample["tokens.npy"], np.int64) for sample in read]
        self.learnt = [self._mask(np.asarray(sample["roles.npy"])) for sample in read]

    @staticmethod
    def _mask(roles: np.ndarray) -> np.ndarray:
        mask = (roles == Role.ACTION) | (roles == Role.STATE)
        mask[:1] = False
        return mask

    def __len__(self) -> int:
        return len(self.ids)

    def tokens(self, chosen: list[int]) -> int:
        return int(sum(self.learnt[i].sum() for i in chosen))

    def sequences(self, chosen: list[int], total: int) -> list[TrainSequence]:
        """Turns to imitate; the loss is the mean over `total` tokens of the whole step."""
        return [TrainSequence(self.ids[i], ce=self.learnt[i].astype(np.float32) / np.float32(max(total, 1))) for i in chosen]


def run(stage: AgentSupervised, job: Job) -> dict[str, Any]:
    """Train for the given epochs and say what the held-out turns cost."""
    lessons = Lessons(job, stage.data, TRAIN)
    if not len(lessons):
        raise ConfigError(f"stage '{stage.data}' left no turn to imitate: its answers lack tags; set only_tagged: false or warm it up")
    engine = build_engine(job, stage.optimizer, stage.init, stage.lora)
    steps = max(1, round(stage.epochs * len(lessons) / stage.sequences_per_step))

    def portion(step: int) -> Portion:
        places = range(step * stage.sequences_per_step, (step + 1) * stage.sequences_per_step)
        mine = [shuffled(len(lessons), job.recipe.seed, place) for place in job.mesh.share(places)]
        total = sum(job.mesh.gather(lessons.tokens(mine)))
        rows = lessons.sequences(mine, total)
        return Portion(spread(rows, stage.microbatch_tokens, job.mesh, job.model.hidden).batches, total)

    outcome = fit(stage, job, engine, steps, lambda kept: portion)
    return {**outcome, "turns": len(lessons), "held_out_loss": held_out_loss(stage, job, engine)}


def held_out_loss(stage: AgentSupervised, job: Job, engine: Any) -> float | None:
    """Mean cross-entropy of held-out trajectories' turns, None where none were held out."""
    lessons = Lessons(job, stage.data, HELD_OUT)
    chosen = list(range(min(len(lessons), HELD_OUT_MOST)))
    if not chosen:
        return None
    batches = pack(lessons.sequences(chosen, lessons.tokens(chosen)), budget=stage.microbatch_tokens, pad=False)
    scored = engine.score(batches, logprob_score(1.0))
    return float(-sum((s["logprob"].cpu() * b.ce_weight_T).sum() for s, b in zip(scored, batches, strict=True)))
