"""Every kind of stage at every layout, through the recipes: with the same samples all must agree with one rank.

Loss, gradient norm, every gradient and every count to 2e-6; weights after an update too, where the update is linear in
the gradient. How far AdamW's weights may differ is said where it is tested.
"""

from __future__ import annotations

import atexit
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from terrella.core.config import OptimizerConfig, PrecisionConfig
from terrella.core.metrics import MetricsFile
from terrella.launch import recipe as recipes
from terrella.tests.golden.inputs import make_inputs
from terrella.tests.golden.observe import flat
from terrella.tests.golden.play import CASES
from terrella.tests.parallel.recipe_jobs import run_case
from terrella.tests.sampling import few, in_turn, sampled

pytestmark = pytest.mark.timeout(3600)  # the first test waits for all runs on one rank
TOLERANCE = 2e-6
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "cp2": (2, {"context": 2}),
    "tp2_dp2": (4, {"tensor": 2}),
    "dp2": (2, {}),
    "tp2_sp_pp2": (4, {"tensor": 2, "sequence_parallel": True, "pipeline": 2}),
}
# AdamW far from its floor: with an eps above every gradient the update is lr / eps times the gradient, which is SGD's
SGD = {
    "lr": 1e4,
    "eps": 1e6,
    "betas": (1e-9, 0.95),
    "clip_grad": 0.0,
    "schedule": "constant",
    "warmup_steps": 0,
    "min_lr": 0.0,
}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"expert": 2}),
    "tp2_ep2": (4, {"tensor": 2, "sequence_parallel": True, "expert": 2}),
    "ep2_alltoall": (2, {"expert": 2, "expert_dispatch": "alltoall"}),
}
EXPERTS = {
    "family": "qwen3_moe",
    "experts": 4,
    "experts_per_token": 2,
    "expert_ffn": 24,
    "qk_norm": True,
    "qkv_bias": False,
    "tied": False,
}


STEPS = 2  # that are compared; later ones begin from weights that differ by rounding
# what a model of two layers that has seen this little can sometimes do, so that groups have a signal
EASIER: dict[tuple[str, str], Callable[[Any, Any], Any]] = {
    ("sokoban", "rlvr"): lambda stage, env: replace(
        stage, env=replace(env, steps=1, walk=1), samples_per_prompt=12, temperature=1.0
    )
}
# stages that no row needs
LEFT_OUT = {"sokoban-worlds": ("agent-in-sft", "agent-in-rlvr", "other-agent", "models-on-agent", "evaluate")}
ROWS = [  # case, stage
    ("sokoban", "pretrain"),
    ("sokoban", "rlvr"),
    ("sokoban", "evaluate"),
    ("sokoban-ppo", "rlvr"),
    ("text-game", "sft"),
    ("text-game", "rlvr"),
    ("text-game", "evaluate"),
    ("spa-sokoban-tiny", "warmup"),
    ("spa-sokoban-tiny", "spa"),
    ("spa-sokoban-tiny", "vanilla"),
    ("spa-sokoban-tiny", "evaluate"),
    ("sokoban-worlds", "world-rlvr"),
    ("sokoban-worlds", "agent-in-longer"),
    ("sokoban-worlds", "models"),
    ("webrl", "sft"),
    ("webrl", "orm"),
    ("webrl", "phase-1-critic"),
    ("webrl", "phase-1-actor"),
    ("webrl", "phase-1-replay"),
    ("webrl-grpo", "phase-1-actor"),
    ("video", "pretrain"),
    ("video", "rlvr"),
    ("video", "evaluate"),
    ("own-data", "sft"),
    ("own-data", "rl"),
    ("own-data", "eval"),
    ("own-env", "sft"),
    ("own-env", "rl"),
    ("own-env", "eval"),
]


@cache
def place() -> Path:
    """Where this session's runs lie."""
    folder = Path(tempfile.mkdtemp(prefix="terrella-layouts-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make_inputs(folder / "inputs")
    return folder


def load(case: str, sgd: bool = True, **model: Any) -> recipes.Recipe:
    """A golden case with two layers, so that a pipeline has something to cut."""
    recipe = recipes.load(str(CASES / f"{case}.yaml"))
    recipe = replace(recipe, model=replace(recipe.model, layers=2, **model))
    stages = [
        EASIER[case, stage.name](stage, recipe.env) if (case, stage.name) in EASIER else stage
        for stage in recipe.stages
        if stage.name not in LEFT_OUT.get(case, ())
    ]
    return replace(recipe, stages=[_sgd(stage) for stage in stages] if sgd else stages)


def _sgd(stage: Any) -> Any:
    """Few steps, each of them plain gradient descent."""
    changed: dict[str, Any] = {"steps": STEPS} if getattr(stage, "steps", None) else {}
    for name in ("optimizer", "critic"):
        if isinstance(getattr(stage, name, None), OptimizerConfig):
            changed[name] = replace(getattr(stage, name), **SGD)
    if hasattr(stage, "training"):
        changed["training"] = replace(stage.training, optimizer=replace(stage.training.optimizer, **SGD))
    return replace(stage, **changed) if changed else stage


@cache
def whole(case: str) -> Path:
    """The whole case on one rank, as its recipe trains it."""
    folder = place() / "runs" / case
    run_case(load(case, sgd=False), folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def one_rank_runs(request: pytest.FixtureRequest) -> None:
    """What this module's tests compare with runs on one rank: two at a time, since one rank keeps one core busy."""
    chosen = [
        item.callspec.params
        for item in request.session.items
        if item.path == Path(__file__) and hasattr(item, "callspec")
    ]
    pairs = dict.fromkeys((params["case"], params["stage"]) for params in chosen if "case" in params)
    place()
    with ThreadPoolExecutor(2) as two:
        for calls in (
            [partial(whole, case) for case in dict.fromkeys(case for case, _ in pairs)],
            [partial(measure, *pair) for pair in pairs],
        ):
            for made in [two.submit(call) for call in calls]:
                made.exception()  # the test that wants it fails by it


@cache
def experts(case: str) -> Path:
    """The case up to its first trained stage, with a model of experts, on one rank; what comes before is the dense
    model's.
    """
    folder = place() / "runs" / f"{case}-experts"
    run_case(load(case, sgd=False, **EXPERTS), folder, source=whole(case), stage="pretrain")
    return folder


@cache
def measure_experts(
    case: str, stage: str, layout: str | None = None, last_bits: bool = False, balance: float = 0.0
) -> tuple[Path, list[dict[str, Any]]]:
    """A stage with a model of experts; RL samples on one rank, and trains on those samples at a layout."""
    world, parallel = EXPERT_LAYOUTS[layout] if layout else (1, {})
    kind = f"{'balanced' if balance else 'experts'}-{layout or 'one'}{'-bits' if last_bits else ''}"
    folder = place() / "runs" / f"{case}-{stage}-{kind}"
    samples = measure_experts(case, stage, balance=balance)[0] if layout or last_bits else None
    recipe = load(case, **EXPERTS)
    stages: list[Any] = list(recipe.stages)
    stages = [replace(s, optimizer=replace(s.optimizer, balance=balance)) if s.name == stage else s for s in stages]
    recipe = replace(recipe, stages=stages)
    return folder, run_case(recipe, folder, world, parallel, experts(case), stage, samples, last_bits)


@cache
def measure(
    case: str, stage: str, layout: str | None = None, last_bits: bool = False
) -> tuple[Path, list[dict[str, Any]]]:
    """One stage of the case, after what `whole` left, at a layout."""
    world, parallel = LAYOUTS[layout] if layout else (1, {})
    folder = place() / "runs" / f"{case}-{stage}-{layout or 'one'}{'-bits' if last_bits else ''}"
    return folder, run_case(load(case), folder, world, parallel, whole(case), stage, whole(case), last_bits)


def close(one: float, other: float, name: str, size: float = 0.0, within: float = TOLERANCE) -> None:
    """Equal to rounding; `size` is that of the terms of a sum in which they cancel, as advantages of a group do."""
    assert abs(one - other) <= within * max(abs(one), abs(other), size), (
        f"{name}: {other} at the layout, {one} on one rank"
    )


def gradient_errors(a: dict[str, Any], b: dict[str, Any]) -> dict[str, float]:
    """How far the gradients of a step are apart, each beside its own size, and the norm's distance."""
    scale = max(a["norm"], 1e-6)
    errors = {
        name: float((b["gradients"][name] - gradient).norm() / max(gradient.norm(), 1e-3 * scale))
        for name, gradient in a["gradients"].items()
    }
    return errors | {"norm": abs(a["norm"] - b["norm"]) / max(a["norm"], b["norm"], 1e-30)}


def of_rewards(folder: Path, stage: str) -> float:
    """What rounding of rewards may change in advantages: pictures are judged in batches, and a group's rewards that are
    all but equal are divided by how little they differ.
    """
    rows = [r for r in MetricsFile(folder / "metrics.jsonl").rows() if r["stage"] == stage]
    return max(
        (2.0**-22 * abs(r["reward/mean"]) / r["reward/group_std"] for r in rows if r.get("reward/group_std")),
        default=0.0,
    )


def compare_steps(
    one: list[dict[str, Any]],
    other: list[dict[str, Any]],
    rewards: float,
    last_bits: Callable[[], list[dict[str, Any]]],
) -> None:
    """Where gradients are further apart than the tolerance, one rank with changed `last_bits` of its weights says how
    far rounding alone takes them: those of a token that is all but certain are what is left of larger terms. `rewards`
    is what rounding does to advantages.
    """
    assert len(one) == len(other)
    # a critic's steps stand between the policy's
    for number, (a, b) in enumerate(list(zip(one, other, strict=True))[: 2 * STEPS]):
        assert a["gradients"].keys() == b["gradients"].keys()
        assert a["metrics"].keys() == b["metrics"].keys()
        for name in ("tokens", "pg_tokens", "value_tokens", "clipped_low", "clipped_high"):
            assert a["metrics"].get(name) == b["metrics"].get(name), f"step {number}: {name}"
        for name in ("loss", "value_loss", "ce_loss", "pg_loss", "entropy"):
            if name in a["metrics"]:
                close(
                    a["metrics"][name],
                    b["metrics"][name],
                    f"step {number}: {name}",
                    1.0 if a["metrics"].get("pg_tokens") else 0.0,
                )
        errors, within = gradient_errors(a, b), TOLERANCE
        if max(errors.values()) > TOLERANCE:
            within = (
                max(TOLERANCE, min(4 * max(gradient_errors(a, last_bits()[number]).values()), 10 * TOLERANCE)) + rewards
            )
        for name, error in errors.items():
            assert error <= within, f"step {number}: gradient ({name}) off by {error:.2e}, {within:.1e} is rounding"
        for name, weight in a["weights"].items():
            error = (b["weights"][name] - weight).norm() / max(weight.norm(), 1e-3)
            assert error <= TOLERANCE, f"step {number}: weight {name} off by {error:.2e}"


def compare_records(one: Path, other: Path, stage: str) -> None:
    """What the stage told and what its steps wrote: the same keys, counts and, to rounding, values."""
    told = [json.loads((folder / "stages" / f"{stage}.json").read_text()) for folder in (one, other)]
    rows = [[r for r in MetricsFile(folder / "metrics.jsonl").rows() if r["stage"] == stage] for folder in (one, other)]
    a, b = (dict(flat({"told": t, "rows": r})) for t, r in zip(told, rows, strict=True))
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, float) and not key.endswith("drift/mean"):
            size = 20.0 if "psnr" in key else 1.0  # decibels, and what is left when they are taken from one another
            same = math.isclose(value, b[key], rel_tol=1e-5, abs_tol=1e-6 * size)
            # a mean over nothing is NaN at every layout
            assert same or (math.isnan(value) and math.isnan(b[key])), (
                f"{key}: {b[key]} at the layout, {value} on one rank"
            )
        elif not isinstance(value, float):
            assert value == b[key], f"{key}: {b[key]} at the layout, {value} on one rank"


def rows() -> list[Any]:
    """Every stage at every layout; what is not in CI is in the full tier."""
    # every kind of stage is cut over tensor and data ranks, some in turn. Left out are rows whose code another row
    # runs: `spa` is `vanilla` from other weights, WebRL's sft is trained as its critic is, own data and own
    # environments are one verb
    others = {
        ("spa-sokoban-tiny", "spa"),
        ("webrl", "sft"),
        ("sokoban", "evaluate"),
        ("own-data", "eval"),
        ("own-env", "sft"),
    }
    quick = {(case, stage, "tp2_dp2") for case, stage in ROWS if (case, stage) not in others}
    quick |= {
        (*row, layout) for row in (("text-game", "sft"), ("spa-sokoban-tiny", "vanilla")) for layout in ("pp2", "cp2")
    }
    quick |= {
        ("webrl", "phase-1-actor", "cp2"),
        ("sokoban", "rlvr", "pp2"),
        ("sokoban", "evaluate", "pp2"),
        ("own-env", "rl", "pp2"),
        ("sokoban-worlds", "world-rlvr", "pp2"),
        ("sokoban-worlds", "agent-in-longer", "pp2"),
    }
    # pretraining and RL of a grid's model, SFT and RL of language always; of the other cases one with each commit
    always = ("sokoban", "text-game")
    quick = {row for row in quick if row[0] in (*always, *few(sorted({case for case, _ in ROWS} - {*always}), 1))}
    every = [(case, stage, layout) for case, stage in ROWS for layout in LAYOUTS]
    return [row if row in quick else pytest.param(*row, marks=pytest.mark.full) for row in every]


@pytest.mark.parametrize(("case", "stage", "layout"), rows())
def test_a_stage_agrees_with_one_rank(case: str, stage: str, layout: str) -> None:
    one, steps = measure(case, stage)
    other, at_layout = measure(case, stage, layout)
    compare_steps(steps, at_layout, of_rewards(one, stage), lambda: measure(case, stage, last_bits=True)[1])
    compare_records(one, other, stage)


def test_adamw_at_a_layout_stays_near_one_rank() -> None:
    """AdamW divides a gradient by its own size, so rounding can turn the step of a weight whose gradient is next to
    nothing: two updates of lr each way at most. The others move as one rank's do."""
    case, stage, lr = "text-game", "sft", 1e-3
    recipe = load(case)
    stages = [replace(s, optimizer=OptimizerConfig(lr=lr)) if s.name == stage else s for s in recipe.stages]
    runs = [
        run_case(
            replace(recipe, stages=stages), place() / "runs" / f"adamw-{name}", world, parallel, whole(case), stage
        )
        for name, (world, parallel) in {"one": (1, {}), "tp2_dp2": LAYOUTS["tp2_dp2"]}.items()
    ]
    for name, weight in runs[0][STEPS - 1]["weights"].items():
        gap = (runs[1][STEPS - 1]["weights"][name] - weight).abs()
        assert gap.max() <= 2 * lr * STEPS and gap.mean() <= 1e-3 * lr, (
            f"{name}: {gap.max():.1e} at most, {gap.mean():.1e} on average"
        )


@pytest.mark.parametrize(
    ("stage", "layout"),
    [
        pytest.param("pretrain", "ep2", marks=pytest.mark.full),
        *sampled([("rlvr", "ep2"), ("rlvr", "ep2_alltoall")], 0 if in_turn("experts") == pytest.mark.full else 1),
        ("pretrain", "tp2_ep2"),
    ],
)
def test_a_stage_with_experts_agrees_with_one_rank(stage: str, layout: str) -> None:
    one, steps = measure_experts("sokoban", stage)
    other, at_layout = measure_experts("sokoban", stage, layout)
    if stage == "rlvr":  # the samples tell where tokens went, and they go there at every layout
        assert all(step["replayed"] > 0 and step["misrouted"] == 0 for step in [*steps, *at_layout])
        assert [s["metrics"]["routing_given"] for s in steps] == [s["metrics"]["routing_given"] for s in at_layout]
    compare_steps(
        steps, at_layout, of_rewards(one, stage), lambda: measure_experts("sokoban", stage, last_bits=True)[1]
    )
    compare_records(one, other, stage)


@in_turn("balanced experts")
@pytest.mark.parametrize(
    ("stage", "layout"), [pytest.param("rlvr", "ep2", marks=pytest.mark.full), ("pretrain", "tp2_ep2")]
)
def test_balanced_experts_agree_with_one_rank(stage: str, layout: str) -> None:
    """The loss that keeps choices even is over the same documents at every layout, in gradients and in the record."""
    measured = partial(measure_experts, "sokoban", stage, balance=0.05)
    (one, steps), (other, at_layout) = measured(), measured(layout)
    compare_steps(steps, at_layout, of_rewards(one, stage), lambda: measured(last_bits=True)[1])
    compare_records(one, other, stage)
    rows = [r for r in MetricsFile(one / "metrics.jsonl").rows() if r["stage"] == stage]
    assert rows and all(row["balance_loss"] > 0.05 for row in rows)


@pytest.mark.full
def test_tokens_go_where_older_weights_in_bf16_sent_them() -> None:
    """Rollouts a step ahead, in bf16, with experts on two ranks: routers would choose otherwise, and none does; without
    replay nothing is given to them.
    """
    recipe = load("sokoban", **EXPERTS)
    world, parallel = EXPERT_LAYOUTS["ep2"]

    def ahead(stage: Any, replays: bool) -> Any:
        if stage.name != "rlvr":
            return stage
        rollouts = replace(stage.rollouts, ahead=1, replay_routing=replays)
        # steps that move weights by enough to change a choice
        return replace(stage, rollouts=rollouts, steps=4, drift_gate=10.0, optimizer=OptimizerConfig(lr=0.02))

    for replays in (True, False):
        changed = replace(
            recipe, stages=[ahead(stage, replays) for stage in recipe.stages], precision=PrecisionConfig("bf16")
        )
        folder = place() / "runs" / f"sokoban-rlvr-experts-ahead-{replays}"
        steps = run_case(changed, folder, world, parallel, experts("sokoban"), "rlvr")
        rows = [r for r in MetricsFile(folder / "metrics.jsonl").rows() if r["stage"] == "rlvr"]
        assert len(steps) == len(rows) == 4
        assert all(step["misrouted"] == 0 for step in steps)
        if replays:
            assert all(step["replayed"] > 0 for step in steps)
            assert max(row["staleness/max"] for row in rows) == 1 and max(row["routing/disagreed"] for row in rows) > 0
        else:
            assert not any(step["replayed"] for step in steps) and not any("routing/disagreed" in row for row in rows)
