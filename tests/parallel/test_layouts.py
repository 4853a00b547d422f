"""Every layout against one rank: loss, gradient norm, per-tensor gradients and scores."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from terrella.core.config import ParallelConfig
from terrella.tests.parallel.pool import run_ranks
from terrella.tests.sampling import sampled

ROWS = {
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "tp2_pp2": (4, {"tensor": 2, "pipeline": 2}),
    "dp2": (2, {}),
    "dp2_in_turn": (2, {"overlap_grad_reduce": False}),
    "dp4": (4, {}),
    "dp2_overlap": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "sp": (2, {"tensor": 2, "sequence_parallel": True}),
    "cp2": (2, {"context": 2}),
    "tp2_sp_cp2": (4, {"tensor": 2, "sequence_parallel": True, "context": 2}),
    "tp2_dp2": (4, {"tensor": 2}),
    "recompute": (1, {"recompute": "full"}),
}
TOLERANCE = 2e-6


KIND_ROWS = {
    "tied-pp2": ("tied", 2, {"pipeline": 2}),
    "tied-sp": ("tied", 2, {"tensor": 2, "sequence_parallel": True}),
    "gemma-sp": ("gemma", 2, {"tensor": 2, "sequence_parallel": True}),
    "gemma-cp2": ("gemma", 2, {"context": 2}),
    "gemma-pp2": ("gemma", 2, {"pipeline": 2}),
    "lora-tp2": ("lora", 2, {"tensor": 2}),
    "lora-sp_dp2": ("lora", 4, {"tensor": 2, "sequence_parallel": True}),
    "lora-pp2": ("lora", 2, {"pipeline": 2}),
    "lora-cp2": ("lora", 2, {"context": 2}),
    "moe-ep2": ("moe", 2, {"expert": 2}),
    "moe-sp": ("moe", 2, {"tensor": 2, "sequence_parallel": True}),
    "moe-ep2_sp_dp2": ("moe", 4, {"expert": 2, "tensor": 2, "sequence_parallel": True}),
    "moe-ep2-alltoall": ("moe", 2, {"expert": 2, "expert_dispatch": "alltoall"}),
    "moe-ep2_sp-alltoall": (
        "moe",
        4,
        {"expert": 2, "tensor": 2, "sequence_parallel": True, "expert_dispatch": "alltoall"},
    ),
    "moe-ep2_pp2": ("moe", 4, {"expert": 2, "pipeline": 2}),
    "balance-ep2": ("balance", 2, {"expert": 2}),
    "balance-dp2": ("balance", 2, {}),
    "balance-cp2": ("balance", 2, {"context": 2}),
    "balance-pp2": ("balance", 2, {"pipeline": 2}),
    "balance-ep2_sp-alltoall": (
        "balance",
        4,
        {"expert": 2, "tensor": 2, "sequence_parallel": True, "expert_dispatch": "alltoall"},
    ),
    "balance-sp_cp2": ("balance", 4, {"tensor": 2, "sequence_parallel": True, "context": 2}),
    "balance-recompute": ("balance", 1, {"recompute": "full"}),
    "value-tp2": ("value", 2, {"tensor": 2}),
    "value-sp": ("value", 2, {"tensor": 2, "sequence_parallel": True}),
    "value-pp2": ("value", 2, {"pipeline": 2}),
    "value-dp2": ("value", 2, {}),
    "value-cp2": ("value", 2, {"context": 2}),
    "kernel-tp2": ("kernel", 2, {"tensor": 2}),
    "kernel-sp": ("kernel", 2, {"tensor": 2, "sequence_parallel": True}),
    "kernel-cp2": ("kernel", 2, {"context": 2}),
    # more tensor ranks than key heads
    "one-kv-tp2": ("one-kv", 2, {"tensor": 2}),
    "one-kv-sp": ("one-kv", 2, {"tensor": 2, "sequence_parallel": True}),
    "one-kv-tp2_pp2": ("one-kv", 4, {"tensor": 2, "pipeline": 2}),
    "one-kv-tp2_dp2": ("one-kv", 4, {"tensor": 2}),
    "one-kv-sp_cp2": ("one-kv", 4, {"tensor": 2, "sequence_parallel": True, "context": 2}),
    "one-kv-tp2-recompute": ("one-kv", 2, {"tensor": 2, "recompute": "full"}),
    "one-kv-tp4": ("one-kv", 4, {"tensor": 4}),
    "one-kv-norms-sp": ("one-kv-norms", 2, {"tensor": 2, "sequence_parallel": True}),
    "one-kv-norms-tp2": ("one-kv-norms", 2, {"tensor": 2}),
    "one-kv-moe-sp": ("one-kv-moe", 2, {"tensor": 2, "sequence_parallel": True}),
    "one-kv-lora-tp2": ("one-kv-lora", 2, {"tensor": 2}),
    "one-kv-lora-sp_dp2": ("one-kv-lora", 4, {"tensor": 2, "sequence_parallel": True}),
    "dense-tp4": ("dense", 4, {"tensor": 4}),
    "dense-tp4_sp": ("dense", 4, {"tensor": 4, "sequence_parallel": True}),
    "lora-tp4_sp": ("lora", 4, {"tensor": 4, "sequence_parallel": True}),
}


@cache
def measure(world: int, packed: bool, parallel: tuple = (), kind: str = "dense") -> dict:
    return run_ranks("terrella.tests.parallel.jobs:measure", world, parallel=dict(parallel), packed=packed, kind=kind)[
        0
    ]


def compare(reference: dict, other: dict) -> None:
    norm = reference["norm"]
    assert abs(other["metrics"]["loss"] - reference["metrics"]["loss"]) <= TOLERANCE * abs(reference["metrics"]["loss"])
    assert other["metrics"]["tokens"] == reference["metrics"]["tokens"]
    if "balance_loss" in reference["metrics"]:
        assert other["metrics"]["balance_loss"] == pytest.approx(reference["metrics"]["balance_loss"], rel=TOLERANCE)
    assert abs(other["norm"] - norm) <= TOLERANCE * norm
    whole = sum(float(gradient.double().square().sum()) for gradient in other["gradients"].values()) ** 0.5
    assert abs(other["norm"] - whole) <= TOLERANCE * norm  # every parameter once
    assert other["gradients"].keys() == reference["gradients"].keys()
    for name, gradient in reference["gradients"].items():
        error = (other["gradients"][name] - gradient).norm() / max(gradient.norm(), 1e-3 * norm)
        assert error <= TOLERANCE, f"{name}: gradient off by {error:.2e}"
    torch.testing.assert_close(other["scores"], reference["scores"], atol=2e-6, rtol=0)


# where documents of one length take another way; the others are in the full tier
EVEN = {"pp2", "cp2", "dp2_overlap", "tp2_sp_cp2"}


@pytest.mark.parametrize(
    ("row", "packed"),
    [(row, True) for row in ROWS]
    + [pytest.param(row, False, marks=[pytest.mark.full] * (row not in EVEN)) for row in ROWS],
)
def test_layout(row: str, packed: bool) -> None:
    world, parallel = ROWS[row]
    compare(measure(1, packed), measure(world, packed, tuple(parallel.items())))


def kind_rows() -> list[Any]:
    """Of every kind of model half of the layouts in CI, drawn by the commit."""
    by_kind = {kind: [row for row in KIND_ROWS if KIND_ROWS[row][0] == kind] for kind, _, _ in KIND_ROWS.values()}
    return [param for rows in by_kind.values() for param in sampled(rows, (len(rows) + 1) // 2)]


@pytest.mark.parametrize("row", kind_rows())
def test_kind_of_model(row: str) -> None:
    kind, world, parallel = KIND_ROWS[row]
    compare(measure(1, True, kind=kind), measure(world, True, tuple(parallel.items()), kind))


def test_balance_is_a_loss_of_its_own() -> None:
    """It changes gradients and not the loss that is reported, and is at least its weight in each layer."""
    plain, balanced = measure(1, True, kind="moe"), measure(1, True, kind="balance")
    assert balanced["metrics"]["loss"] == plain["metrics"]["loss"]
    assert abs(balanced["norm"] - plain["norm"]) > 1e-3 * plain["norm"]
    assert 2 * 0.05 < balanced["metrics"]["balance_loss"] < 2 * 0.1


HALVES = {
    "one": ("dense", True, 1, {}),
    "even": ("dense", False, 1, {}),
    "recompute": ("dense", True, 1, {"recompute": "full"}),
    "overlap": ("dense", True, 2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "pp2": ("dense", True, 2, {"pipeline": 2}),
    "cp2": ("dense", True, 2, {"context": 2}),
    "tied": ("tied", True, 1, {}),
    "interleaved": ("interleaved", True, 1, {}),
}


@pytest.mark.parametrize("row", HALVES)
def test_layers_in_halves_agree_with_modules(row: str) -> None:
    kind, packed, world, parallel = HALVES[row]
    halves = run_ranks(
        "terrella.tests.parallel.jobs:measure_by_halves", world, parallel=parallel, packed=packed, kind=kind
    )[0]
    assert halves["taken"] > 0
    compare(measure(1, packed, kind=kind), halves)


@pytest.mark.parametrize(("kind", "parallel"), [("lora", {}), ("moe", {}), ("dense", {"tensor": 2})])
def test_halves_are_left_where_they_would_be_wrong(kind: str, parallel: dict) -> None:
    world = parallel.get("tensor", 1)
    halves = run_ranks(
        "terrella.tests.parallel.jobs:measure_by_halves", world, parallel=parallel, packed=True, kind=kind
    )[0]
    assert halves["taken"] == 0
    compare(measure(1, True, kind=kind), halves)


def test_kernel_agrees_with_plain_softmax() -> None:
    compare(measure(1, True), measure(1, True, kind="kernel"))


def test_a_gather_in_the_background_is_never_seen_half_done() -> None:
    """Weights read after an update, as exports and weight sync read them, are those of the update."""
    overlap = tuple(ROWS["dp2_overlap"][1].items())
    plain, overlapped = measure(2, True), measure(2, True, overlap)
    for name, weight in plain["weights"].items():
        torch.testing.assert_close(overlapped["weights"][name], weight, atol=1e-6, rtol=0)


def test_layers_wait_for_their_own_buckets() -> None:
    """With small buckets weights of later layers are still on their way when the first begins; the second step is that
    of ranks which reduce and gather at once.
    """
    job, overlap = "terrella.tests.parallel.jobs:two_steps", {"overlap_grad_reduce": True, "overlap_param_gather": True}
    plain = run_ranks(job, 2, parallel={"overlap_grad_reduce": False})[0]
    found = run_ranks(job, 2, parallel=overlap, bucket=1000)[0]
    assert plain["buckets"] == 1 and plain["under way"] == 0 and found["buckets"] > 4 and found["under way"] > 0
    for ours, theirs in zip(found["trace"], plain["trace"], strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)
    for name, weight in plain["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, atol=1e-6, rtol=0)


def test_a_pipeline_pads_no_microbatch_to_the_longest() -> None:
    """Chunks that are interleaved still do; the rows above say that the results are those of one rank."""
    ask = "terrella.tests.parallel.jobs:padded_lengths"
    plain = run_ranks(ask, 1, parallel={})[0]
    assert len({*plain["lengths"]}) > 1 and plain["lengths"] == plain["tokens"]
    assert run_ranks(ask, 2, parallel={"pipeline": 2})[0] == plain
    chunks = run_ranks(ask, 2, parallel={"pipeline": 2, "virtual_pipeline": 2})[0]
    assert chunks["lengths"] == [max(plain["lengths"])] * len(plain["lengths"])


@pytest.mark.parametrize("count", [1, 3])
def test_interleaved_chunks_score_any_number_of_microbatches(count: int) -> None:
    """Held-out lessons and probes of an evaluation are as many as they are."""
    ask = "terrella.tests.parallel.jobs:scores"
    plain = run_ranks(ask, 1, parallel={}, count=count)[0]
    for found in run_ranks(ask, 2, parallel={"pipeline": 2, "virtual_pipeline": 2}, count=count):
        torch.testing.assert_close(found, plain, atol=2e-6, rtol=0)


def test_gradients_are_reduced_while_others_are_computed_where_there_are_several_data_ranks() -> None:
    assert not ParallelConfig().resolved(1).overlap_grad_reduce
    assert not ParallelConfig(tensor=2, pipeline=2).resolved(4).overlap_grad_reduce
    assert ParallelConfig(tensor=2).resolved(4).overlap_grad_reduce
    assert ParallelConfig(context=2).resolved(2).overlap_grad_reduce
    assert not ParallelConfig(cuda_graphs=True).resolved(2).overlap_grad_reduce
    assert ParallelConfig(overlap_grad_reduce=False).resolved(2).overlap_grad_reduce is False
