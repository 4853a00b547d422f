"""Next-frame prediction by cross-entropy on token shards: pre-training a video world model, or going on with it as a control.

A released transformer can stand in for the training; other stages then start from this one as from any other.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np

from ...data.packing import SequenceTable, pack
from ...data.shards import Reader, ShardSet, ShuffledOrder
from ...models.hf import require_same
from ...models.hub import resolve
from ..job import Job
from ..settings.video import VideoSupervised
from .common import build_engine, first_checkpoint
from .fitting import Portion, Portions, fit, steps_for
from .video import settings


def check(stage: VideoSupervised, job: Job) -> None:
    """A released transformer is there, and is the recipe's model."""
    if stage.released is not None:
        require_same(resolve(stage.released), job.model)


def run(stage: VideoSupervised, job: Job) -> dict[str, Any]:
    """Train to the last step and say how many gradient tokens it took; or take released weights."""
    if stage.released is not None:
        return {"steps": 0, "tokens": 0, "checkpoint": first_checkpoint(job, stage.name, resolve(stage.released))}
    layout = settings(job).layout
    shards = ShardSet(job.stage_folder(stage.data) / "train")
    each = stage.sequences_per_step * int(layout.loss_mask_L.sum())
    steps = stage.steps or steps_for(job.outcome(str(stage.match_tokens_of))["tokens"], each)
    engine = build_engine(job, stage.optimizer, stage.init)
    mine = job.mesh.require_even(stage.sequences_per_step, f"stages: {stage.name}.sequences_per_step")
    weight_L = layout.loss_mask_L.astype(np.float32) / each

    def begin(kept: dict[str, Any]) -> Portions:
        order = ShuffledOrder(shards.counts, seed=job.recipe.seed, window=0)
        stream = iter(reader := Reader(shards, order, rank=job.mesh.data_rank, ranks=job.mesh.data_size, state=kept.get("reader")))

        def portion(step: int) -> Portion:
            rows_BL = np.stack([s["tokens.npy"] for s in islice(stream, mine)]).astype(np.int64)
            table = SequenceTable.from_matrix(rows_BL, ce=np.broadcast_to(weight_L, rows_BL.shape))
            batches = pack(table, budget=stage.microbatch_sequences * (layout.total - 1), pad=False)
            return Portion(batches, each, {"reader": reader.state_in_step().to_json()})

        return portion

    return fit(stage, job, engine, steps, begin)
