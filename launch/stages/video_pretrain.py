"""Next-frame prediction by cross-entropy on token shards: pre-training a video world model, or going on with it as a control."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import numpy as np

from ...core.progress import Progress
from ...data.packing import SequenceTable, pack
from ...data.shards import Reader, ShardSet, ShuffledOrder
from ...kernels.policy_loss import PolicySettings
from ...rl.loop import require_finite
from ...rl.objective import make_loss
from ..job import Job
from ..settings.video import VideoSupervised
from .common import Checkpoints, build_engine
from .video import settings


def run(stage: VideoSupervised, job: Job) -> dict[str, Any]:
    """Train to the last step and say how many gradient tokens it took."""
    layout = settings(job).layout
    shards = ShardSet(job.stage_folder(stage.data) / "train")
    each = stage.sequences_per_step * int(layout.loss_mask_L.sum())
    steps = stage.steps
    if steps is None:
        assert stage.match_tokens_of is not None
        steps = max(1, -(-job.outcome(stage.match_tokens_of)["tokens"] // each))
    engine = build_engine(job, stage.optimizer, stage.init)
    checkpoints = Checkpoints(job, stage.name, stage.checkpoint_every, steps)
    start, extra = checkpoints.resume(engine)
    order = ShuffledOrder(shards.counts, seed=job.recipe.seed, window=0)
    stream = iter(reader := Reader(shards, order, rank=engine.data_rank, ranks=engine.data_size, state=extra.get("reader")))
    loss = make_loss(PolicySettings())
    progress = Progress(stage.name, steps, start=start, speak=job.speaks)
    mine = stage.sequences_per_step // engine.data_size
    weight_L = layout.loss_mask_L.astype(np.float32) / each
    for step in range(start, steps):
        begun = time.monotonic()
        rows_BL = np.stack([s["tokens.npy"] for s in islice(stream, mine)]).astype(np.int64)
        table = SequenceTable.from_matrix(rows_BL, ce=np.broadcast_to(weight_L, rows_BL.shape))
        result = engine.step(pack(table, budget=stage.microbatch_sequences * (layout.total - 1), pad=False), loss)
        took = time.monotonic() - begun
        values = {
            "loss": result.metrics["loss"],
            "entropy": result.metrics["entropy"] / result.metrics["tokens"],
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": (step + 1) * each,
        }
        require_finite(values, step)
        if job.speaks and ((step + 1) % stage.log_every == 0 or step + 1 == steps):
            speed = {"time/step_s": took, "time/tokens_per_s": rows_BL.size * engine.data_size / took}
            job.run.metrics.append(stage.name, step + 1, {**values, **speed})
        progress.update(step + 1, f"loss {values['loss']:.4f}")
        checkpoints.save(engine, step + 1, {"reader": reader.state_in_step().to_json()})
    return {"steps": steps, "tokens": steps * each, "checkpoint": checkpoints.final()}
