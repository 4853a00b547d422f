"""More tensor ranks than key heads, through a recipe: a Hugging Face folder is read, tuned, trained by GRPO, evaluated
and exported by ranks that share heads, and all of it agrees with one rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from terrella.core.checkpoint import CheckpointReader
from terrella.core.files import read_json
from terrella.core.metrics import MetricsFile
from terrella.launch import recipe as recipes
from terrella.launch.settings.base import Lora
from terrella.models.folder import PROOF, HFFolder
from terrella.models.stand_in import byte_vocab, write_byte_tokenizer, write_weights
from terrella.tests.parallel.recipe_jobs import run_case
from terrella.tests.parallel.test_recipes import compare_records, compare_steps, load, of_rewards, place
from terrella.tests.sampling import in_turn, sampled

pytestmark = pytest.mark.timeout(1800)
CASE = "own-data"
ROWS: dict[str, tuple[int, int, dict[str, Any]]] = {  # key heads, ranks, layout
    "tp2": (1, 2, {"tensor": 2}),
    "tp2_sp_pp2": (1, 4, {"tensor": 2, "sequence_parallel": True, "pipeline": 2}),
    "tp4_sp": (2, 4, {"tensor": 4, "sequence_parallel": True}),
}
DRAWN = sampled(list(ROWS), 1)


@cache
def recipe(kv_heads: int, sgd: bool) -> recipes.Recipe:
    """The case as a small Qwen2 with biases, which begins from a folder."""
    sizes = {"heads": 4, "kv_heads": kv_heads, "head_dim": 8, "vocab": byte_vocab()}
    made = load(CASE, sgd, family="qwen2", qkv_bias=True, tied=True, **sizes)
    folder = place() / f"qwen2-{kv_heads}"
    if not folder.exists():
        write_byte_tokenizer(folder)
        write_weights(made.model.sizes, folder)
    stages = [replace(stage, folder=str(folder)) if stage.kind == "start" else stage for stage in made.stages]
    return replace(made, stages=stages)


@cache
def whole(kv_heads: int) -> Path:
    """The whole recipe on one rank."""
    folder = place() / "runs" / f"shared-{kv_heads}"
    run_case(recipe(kv_heads, False), folder)
    return folder


@cache
def measure(stage: str, kv_heads: int, row: str | None, last_bits: bool = False) -> tuple[Path, list[dict[str, Any]]]:
    """A stage after what `whole` left; the first one with the folder read by the same ranks."""
    _, world, parallel = ROWS[row] if row else (kv_heads, 1, {})
    folder = place() / "runs" / f"shared-{kv_heads}-{stage}-{row or 'one'}{'-bits' if last_bits else ''}"
    source = None if stage == "sft" else whole(kv_heads)
    samples = whole(kv_heads) if stage == "rl" else None
    return folder, run_case(recipe(kv_heads, True), folder, world, parallel, source, stage, samples, last_bits)


@in_turn("shared heads")
@pytest.mark.parametrize("stage", ["sft", "rl", "eval"])
@pytest.mark.parametrize("row", DRAWN)
def test_a_stage_agrees_with_one_rank(row: str, stage: str) -> None:
    kv_heads = ROWS[row][0]
    one, steps = measure(stage, kv_heads, None)
    other, at_layout = measure(stage, kv_heads, row)
    assert stage == "eval" or len(steps) > 1
    compare_steps(steps, at_layout, of_rewards(one, stage), lambda: measure(stage, kv_heads, None, last_bits=True)[1])
    compare_records(one, other, stage)
    if stage == "sft":  # what was read of the folder
        told = [read_json(folder / "stages" / "start.json") for folder in (one, other)]
        a, b = (CheckpointReader(folder / t["checkpoint"]) for folder, t in zip((one, other), told, strict=True))
        assert a.names() == b.names() and all(torch.equal(a.full(name), b.full(name)) for name in a.names())


@in_turn("shared heads")
@pytest.mark.parametrize("row", DRAWN)
def test_an_export_is_that_of_one_rank(row: str) -> None:
    one, other = (measure("export", ROWS[row][0], place)[0] / "export" for place in (None, row))
    theirs, ours = HFFolder(one), HFFolder(other)
    assert theirs.names() == ours.names() and len(ours.names()) > 10
    assert all(torch.equal(theirs.get(name), ours.get(name)) for name in ours.names())
    assert 0 <= read_json(other / PROOF)["max_logit_difference"] <= 1e-5


@in_turn("adapters")
def test_adapters_agree_with_one_rank() -> None:
    """A rank's rows of B belong to queries, keys or values wherever its share begins."""
    kv_heads, world, parallel = ROWS["tp4_sp"]
    made = recipe(kv_heads, True)
    stages: list[Any] = [
        replace(stage, lora=Lora(rank=4, alpha=8.0)) if stage.name == "sft" else stage for stage in made.stages
    ]
    runs = [
        run_case(replace(made, stages=stages), place() / "runs" / f"shared-lora-{ranks}", ranks, layout, stage="sft")
        for ranks, layout in ((1, {}), (world, parallel))
    ]
    assert any("linear_qkv.lora.b" in name for name in runs[0][0]["gradients"])
    compare_steps(*runs, 0.0, lambda: runs[0])


@in_turn("shared sampler")
def test_the_embedded_sampler_follows_ranks_that_share_heads(tmp_path: Path) -> None:
    """The whole recipe at the layout, with samples of its own: the trainer gives them the log-probs they were drawn
    with, step after step.
    """
    kv_heads, world, parallel = ROWS["tp4_sp"]
    folder = tmp_path / "runs" / "live"
    run_case(recipe(kv_heads, False), folder, world, parallel)
    rows = [r for r in MetricsFile(folder / "metrics.jsonl").rows() if r["stage"] == "rl"]
    assert len(rows) > 1 and all(0 <= row["logprob_drift/mean"] <= 1e-5 for row in rows), rows
    assert read_json(folder / "export" / PROOF)["max_logit_difference"] <= 1e-5
