"""Our layers in fp8 on a CPU, where the reference computes them: near bf16 by the format's rounding, learning alike,
casting weights once a step, resuming to the bit.

A product's two factors are rounded to three bits of mantissa: each by 2^-4 at most, 2^-4 / sqrt(3) on the average of
equally likely remainders, so the product of many terms by sqrt(2/3) 2^-4 = 0.051 of its norm. Rounding errors of
different products are independent and add by squares; a gradient has passed at most 8 of them in each layer.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from terrella.tests.parallel.jobs import DENSE
from terrella.tests.parallel.pool import run_ranks
from terrella.tests.sampling import sampled

JOBS = "terrella.tests.models.fp8_jobs"
PRODUCT = (2 / 3) ** 0.5 * 2**-4
GRADIENT = PRODUCT * (8 * DENSE.layers) ** 0.5


@cache
def measure(precision: str, **options: Any) -> dict[str, Any]:
    return run_ranks(f"{JOBS}:measure", 1, precision=precision, steps=4, **options)[0]


FORMATS = ["fp8 forward", "fp8", "fp8 all", "fp8 head"]


@pytest.mark.parametrize(
    ("precision", "tied"), [*((one, False) for one in FORMATS), *sampled([(one, True) for one in FORMATS], 1)]
)
def test_gradients_are_bf16s_within_the_formats_rounding(precision: str, tied: bool) -> None:
    got, want = measure(precision, tied=tied), measure("bf16", tied=tied)
    assert 0 < abs(got["loss"] / want["loss"] - 1) <= 2e-2
    assert got["gradients"].keys() == want["gradients"].keys()
    errors = {
        name: float((got["gradients"][name] - value).norm() / max(value.norm(), 1e-3 * want["norm"]))
        for name, value in want["gradients"].items()
    }
    assert max(errors.values()) <= GRADIENT, max(errors.items(), key=lambda item: item[1])
    assert max(errors.values()) >= PRODUCT / 4  # else nothing was computed in fp8
    assert want["losses"][-1] < 0.9 * want["losses"][0]
    assert abs(got["losses"][-1] / want["losses"][-1] - 1) <= 5e-2


def test_recompute_changes_nothing() -> None:
    plain, again = measure("fp8 all"), measure("fp8 all", recompute="full")
    assert plain["losses"] == again["losses"] and plain["norm"] == again["norm"]
    assert all(torch.equal(plain["gradients"][name], value) for name, value in again["gradients"].items())


@pytest.mark.parametrize("precision", ["fp8", "fp8 head"])
@pytest.mark.parametrize("parallel", [{"pipeline": 2}, {"context": 2}], ids=str)
def test_layouts_agree(parallel: dict[str, int], precision: str) -> None:
    """A token's scale does not depend on the others: layers on two ranks compute the same, and attention over two
    ranks' tokens differs by bf16's rounding.
    """
    one = measure(precision)
    two = run_ranks(f"{JOBS}:measure", 2, precision=precision, steps=4, **parallel)[0]
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-6 if "pipeline" in parallel else 1e-2)
    assert two["norm"] == pytest.approx(one["norm"], rel=1e-5 if "pipeline" in parallel else 2e-2)


@pytest.mark.parametrize("products,skip,each", [("forward", 0, 4), ("dgrad", 0, 8), ("all", 0, 12), ("all", 1, 12)])
def test_products_of_a_step(products: str, skip: int, each: int) -> None:
    """Two microbatches: twice the products, weights cast once."""
    layers = DENSE.layers - 2 * skip
    counts = run_ranks(f"{JOBS}:count_products", 1, products=products, skip=skip)[0]
    assert counts == {"products": 2 * each * layers, "casts": 4 * layers}
    with_head = run_ranks(f"{JOBS}:count_products", 1, products=products, skip=skip, head=True)[0]
    assert with_head == {"products": 2 * each * layers, "casts": 4 * layers + 1, "head": 2}


def test_microbatches_add_up() -> None:
    """The first writes its weight gradients where there were zeros, the others add theirs."""
    for precision, two, apart in run_ranks(f"{JOBS}:added_gradients", 1)[0]:
        for name, value in two.items():
            assert torch.equal(value, apart[name]), f"{precision}: {name}"


def test_scores_are_the_losss_log_probs() -> None:
    """What RL divides by is rounded as what it trains: with the head in fp8 both are, and neither is bf16's."""
    found = run_ranks(f"{JOBS}:scored", 1)[0]
    for precision, (loss, scored) in found.items():
        assert loss == pytest.approx(scored, rel=1e-6), precision
    assert found["fp8 head"][0] != found["fp8"][0]


def test_copies_follow_the_weights() -> None:
    assert run_ranks(f"{JOBS}:fresh_copies", 1)[0] == dict.fromkeys(
        ("start", "step", "load_weights", "dropped", "reload"), True
    )


def test_what_is_refused_names_the_setting() -> None:
    messages = run_ranks(f"{JOBS}:refusals", 1)[0]
    assert "model.experts" in messages["experts"] and "(lora)" in messages["lora"]
    assert messages["vocab"].startswith("model.vocab: 40") and "precision.fp8_head: false" in messages["vocab"]
    assert messages["width"].startswith("model.ffn: 40") and messages["batch_invariant"].startswith("batch_invariant:")
    assert "model.block: gemma" in messages["gemma"] and "none of the model's 4 layers" in messages["skip"]
    assert all("precision.fp8" in message for message in messages.values())
    for message in run_ranks(f"{JOBS}:refuse_tensor", 2):
        assert "parallel.tensor > 1" in message and "precision.fp8: false" in message


@pytest.mark.parametrize("precision", sampled(["fp8", "fp8 all", "fp8 head"], 1))
def test_resume_is_bit_equal(tmp_path: Path, precision: str) -> None:
    common = {"folder": str(tmp_path / "step_00000002"), "parallel": {}, "precision": precision, "total": 4}
    jobs = "terrella.tests.core.checkpoint_jobs"
    whole = run_ranks(f"{jobs}:train_and_save", 1, at=2, **common)[0]
    again = run_ranks(f"{jobs}:resume", 1, **common)[0]
    assert again["trace"] == whole["trace"][2:]
    for name, value in whole["states"].items():
        assert torch.equal(value.view(torch.uint8), again["states"][name].view(torch.uint8)), name


def test_checkpoints_are_those_of_bf16(tmp_path: Path) -> None:
    """A run in fp8 goes on in bf16 and the other way round: the files hold the same tensors."""
    common = {"folder": str(tmp_path / "step_00000002"), "parallel": {}, "total": 3}
    jobs = "terrella.tests.core.checkpoint_jobs"
    whole = run_ranks(f"{jobs}:train_and_save", 1, at=2, precision="fp8", **common)[0]
    other = run_ranks(f"{jobs}:resume", 1, precision="bf16", **common)[0]
    assert whole["states"].keys() == other["states"].keys() and other["step"] == 3
    assert other["trace"] != whole["trace"][2:]


@pytest.mark.parametrize("precision", sampled(["fp8", "fp8 head"], 1))
def test_offload_changes_nothing(precision: str) -> None:
    for result in run_ranks("terrella.tests.core.engine_jobs:offloaded", 1, precision=precision):
        assert result["plain"] == result["parked"]
