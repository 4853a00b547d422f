"""What ranks run in the Hugging Face tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from terrella.core.config import OptimizerConfig, ParallelConfig, PrecisionConfig
from terrella.core.engine import Engine


def round_trip(
    folder: str, out: str, parallel: dict, dtype: str = "fp32", shard_bytes: int = 5 << 30
) -> dict[str, Any]:
    """Import a folder, compare logits with transformers' own of that folder, export it again."""
    from terrella.models import hf
    from terrella.models.gpt import build_gpt

    config = hf.read_config(folder)
    engine = Engine(build_gpt(config), ParallelConfig(**parallel), OptimizerConfig(), PrecisionConfig(), seed=1)
    hf.import_hf(engine, folder)
    logits = hf.engine_logits(engine, hf.proof_batch(config))
    proof = hf.export_hf(engine, out, carry_from=folder, dtype=dtype, shard_bytes=shard_bytes)
    return {"logits": logits, "proof": proof}


def gradients(folder: str, tokens: list[int], lengths: list[int]) -> dict[str, Any]:
    """The gradient of the mean log-prob of each document's next tokens, under Hugging Face names."""
    import torch

    from terrella.core.batch import PackedBatch
    from terrella.models import hf
    from terrella.models.gpt import build_gpt
    from terrella.tests.parallel.jobs import cross_entropy

    config = hf.read_config(folder)
    engine = Engine(build_gpt(config), ParallelConfig(), OptimizerConfig(), PrecisionConfig(), seed=1)
    hf.import_hf(engine, folder)
    ids, cuts = torch.tensor(tokens), torch.tensor([0, *lengths]).cumsum(0)
    last = torch.zeros(len(tokens)).index_fill_(0, cuts[1:] - 1, 1.0)
    positions = torch.cat([torch.arange(n) for n in lengths])
    weight = (1.0 - last) / float((1.0 - last).sum())
    batch = PackedBatch(ids, ids.roll(-1), positions, cuts.int(), max(lengths), ce_weight_T=weight)
    loss = engine.accumulate([batch], cross_entropy)["loss"]
    named = ((name, gradient.clone()) for name, gradient in engine.gradients())  # their buffers are used again
    return {"loss": loss, "gradients": dict(hf.hf_tensors(config, named, "fp32"))}


def import_error(folder: str, changes: dict[str, Any]) -> str:
    """The message when a folder does not fit the engine's model."""
    from dataclasses import replace

    from terrella.core.errors import TerrellaError
    from terrella.models import hf
    from terrella.models.gpt import build_gpt

    config = replace(hf.read_config(folder), **changes)
    engine = Engine(build_gpt(config), ParallelConfig(), None, PrecisionConfig(), seed=1)
    try:
        hf.import_hf(engine, Path(folder))
    except TerrellaError as error:
        return str(error)
    return ""


def greedy(folder: str, out: str, prompt: list[int], count: int) -> dict[str, Any]:
    """Continue a prompt greedily with the engine's own logits, then export in bf16."""
    import torch

    from terrella.core.batch import PackedBatch
    from terrella.models import hf
    from terrella.models.gpt import build_gpt

    config = hf.read_config(folder)
    engine = Engine(build_gpt(config), ParallelConfig(), None, PrecisionConfig(), seed=1)
    hf.import_hf(engine, folder)
    tokens = list(prompt)
    for _ in range(count):
        ids = torch.tensor(tokens)
        bounds = torch.tensor([0, len(tokens)], dtype=torch.int32)
        batch = PackedBatch(ids, ids, torch.arange(len(tokens)), bounds, len(tokens))
        tokens.append(int(hf.engine_logits(engine, batch)[-1].argmax()))
    return {"tokens": tokens, "proof": hf.export_hf(engine, out, carry_from=folder, dtype="bf16")}
