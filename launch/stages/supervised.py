"""Cross-entropy on shards of transitions: pre-training a world model, or going on with it as a control."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np

from ...data.packing import SequenceTable, pack
from ...data.shards import Reader, ShardSet, ShuffledOrder
from ...rl.imagination import ACTION_LETTERS
from ..job import Job
from ..settings.grid import Supervised
from .common import build_engine
from .fitting import Portion, Portions, fit, steps_for
from .grid import tokenizer_of
from .selfplay import SHARDS


def run(stage: Supervised, job: Job) -> dict[str, Any]:
    """Train to the last step and say how many gradient tokens it took."""
    shards = ShardSet(job.stage_folder(stage.data) / SHARDS)
    each = stage.sequences_per_step * len(tokenizer_of(job).encode(shards[0]["transition.json"]["next_state"]))
    steps = stage.steps or steps_for(job.outcome(str(stage.match_tokens_of))["tokens"], each)
    engine = build_engine(job, stage.optimizer, stage.init)
    mine = job.mesh.require_even(stage.sequences_per_step, f"stages: {stage.name}.sequences_per_step")

    def begin(kept: dict[str, Any]) -> Portions:
        order = ShuffledOrder(shards.counts, seed=job.recipe.seed, window=0)
        stream = iter(reader := Reader(shards, order, rank=job.mesh.data_rank, ranks=job.mesh.data_size, state=kept.get("reader")))

        def portion(step: int) -> Portion:
            table = transition_table(job, [s["transition.json"] for s in islice(stream, mine)], stage.sequences_per_step)
            batches = pack(table, budget=stage.microbatch_sequences * int(table.lengths_S[0] - 1), pad=False)
            return Portion(batches, each, {"reader": reader.state_in_step().to_json()})

        return portion

    return fit(stage, job, engine, steps, begin)


def transition_table(job: Job, samples: list[dict[str, Any]], sequences_per_step: int) -> SequenceTable:
    """State, action, next state as token rows; the loss is the mean over the next states' tokens of the whole step."""
    text = "".join(s["state"] + ACTION_LETTERS[s["action"] - 1] + s["next_state"] for s in samples)
    ids_BL = tokenizer_of(job).encode_array(text).reshape(len(samples), -1)
    prompt = len(samples[0]["state"]) + 1
    weight_BL = np.zeros(ids_BL.shape, np.float32)
    weight_BL[:, prompt:] = 1.0 / (sequences_per_step * (ids_BL.shape[1] - prompt))
    return SequenceTable.from_matrix(ids_BL, ce=weight_BL)
