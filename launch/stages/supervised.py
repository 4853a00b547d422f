"""Cross-entropy on shards of transitions: pre-training a world model, or going on with it as a control."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import numpy as np

from ...core.progress import Progress
from ...data.packing import SequenceTable, pack
from ...data.shards import Reader, ShardSet, ShuffledOrder
from ...kernels.policy_loss import PolicySettings
from ...rl.imagination import ACTION_LETTERS
from ...rl.loop import require_finite
from ...rl.objective import make_loss
from ..job import Job
from ..settings.grid import Supervised
from .common import Checkpoints, build_engine
from .selfplay import SHARDS


def run(stage: Supervised, job: Job) -> dict[str, Any]:
    """Train to the last step and say how many gradient tokens it took."""
    shards = ShardSet(job.stage_folder(stage.data) / SHARDS)
    target_tokens = len(job.tokenizer.encode(shards[0]["transition.json"]["next_state"]))
    steps = stage.steps if stage.steps is not None else matched_steps(stage, job, target_tokens)
    engine = build_engine(job, stage.optimizer, stage.init)
    checkpoints = Checkpoints(job, stage.name, stage.checkpoint_every, steps)
    start, extra = checkpoints.resume(engine)
    order = ShuffledOrder(shards.counts, seed=job.recipe.seed, window=0)
    reader = Reader(shards, order, rank=engine.data_rank, ranks=engine.data_size, state=extra.get("reader"))
    stream = iter(reader)
    loss = make_loss(PolicySettings())
    progress = Progress(stage.name, steps, start=start, speak=job.speaks)
    for step in range(start, steps):
        begun = time.monotonic()
        mine = stage.sequences_per_step // engine.data_size
        table = transition_table(job, [s["transition.json"] for s in islice(stream, mine)], stage.sequences_per_step)
        batches = pack(table, budget=stage.microbatch_sequences * int(table.lengths_S[0] - 1), pad=False)
        result = engine.step(batches, loss)
        tokens = (step + 1) * stage.sequences_per_step * target_tokens
        took = time.monotonic() - begun
        values = {
            "loss": result.metrics["loss"],
            "entropy": result.metrics["entropy"] / result.metrics["tokens"],
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": tokens,
        }
        require_finite(values, step)
        if job.speaks and ((step + 1) % stage.log_every == 0 or step + 1 == steps):
            speed = {"time/step_s": took, "time/tokens_per_s": result.metrics["tokens"] / took}
            job.run.metrics.append(stage.name, step + 1, {**values, **speed})
        progress.update(step + 1, f"loss {values['loss']:.4f}")
        checkpoints.save(engine, step + 1, {"reader": reader.state_in_step().to_json()})
    return {"steps": steps, "tokens": steps * stage.sequences_per_step * target_tokens, "checkpoint": checkpoints.final()}


def matched_steps(stage: Supervised, job: Job, target_tokens: int) -> int:
    """Steps that give at least as many gradient tokens as the other stage saw."""
    assert stage.match_tokens_of is not None
    each = stage.sequences_per_step * target_tokens
    return max(1, -(-job.outcome(stage.match_tokens_of)["tokens"] // each))


def transition_table(job: Job, samples: list[dict[str, Any]], sequences_per_step: int) -> SequenceTable:
    """State, action, next state as token rows; the loss is the mean over the next states' tokens of the whole step."""
    text = "".join(s["state"] + ACTION_LETTERS[s["action"] - 1] + s["next_state"] for s in samples)
    ids_BL = job.tokenizer.encode_array(text).reshape(len(samples), -1)
    prompt = len(samples[0]["state"]) + 1
    weight_BL = np.zeros(ids_BL.shape, np.float32)
    weight_BL[:, prompt:] = 1.0 / (sequences_per_step * (ids_BL.shape[1] - prompt))
    return SequenceTable.from_matrix(ids_BL, ce=weight_BL)
