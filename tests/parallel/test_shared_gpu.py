"""Layouts on CUDA, with the Triton kernels and fused buffers, through recipes: two and four ranks share one GPU,
over gloo.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from terrella.tests.parallel import test_recipes
from terrella.tests.parallel.recipe_jobs import run_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MODEL = {"hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 256}
TOLERANCE = 1e-5  # fp32 through kernels that cut sums in other places at every layout


def measure(case: str, stage: str, world: int = 1, parallel: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """A stage on what the case left on one rank, with the samples it drew there."""
    runs = test_recipes.place() / "gpu"
    source = runs / case
    if not source.exists():
        run_case(test_recipes.load(case, sgd=False, **MODEL), source)
    folder = runs / f"{case}-{stage}-{world}-{'-'.join(parallel or ['one'])}"
    return run_case(test_recipes.load(case, **MODEL), folder, world, parallel, source, stage, source)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2_dp2"])
@pytest.mark.parametrize(("case", "stage"), [("text-game", "sft"), ("sokoban", "rlvr")])
def test_ranks_on_one_gpu_agree_with_one_rank(case: str, stage: str, layout: str) -> None:
    one, other = measure(case, stage), measure(case, stage, *test_recipes.LAYOUTS[layout])
    assert len(one) == len(other)
    a, b = one[0], other[0]
    errors = {
        name: float((b["gradients"][name] - gradient).norm() / max(gradient.norm(), 1e-3 * a["norm"]))
        for name, gradient in a["gradients"].items()
    }
    worst = max(errors, key=lambda name: errors[name])
    loss, norm = (
        abs(x - y) / max(abs(x), 1e-3)
        for x, y in ((a["metrics"]["loss"], b["metrics"]["loss"]), (a["norm"], b["norm"]))
    )
    print(f"{case} {stage} {layout}: loss {loss:.1e}, norm {norm:.1e}, worst gradient {errors[worst]:.1e} ({worst})")
    assert a["metrics"]["tokens"] == b["metrics"]["tokens"]
    assert a["norm"] > 0 and max(errors[worst], norm) <= TOLERANCE
    assert abs(a["metrics"]["loss"] - b["metrics"]["loss"]) <= TOLERANCE * max(abs(a["metrics"]["loss"]), 1.0)
