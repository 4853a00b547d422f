"""The weights that an RL stage began with are kept a second time only where a KL term or the record asks for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from terrella.core.metrics import MetricsFile
from terrella.launch import recipe
from terrella.launch.commands.check_recipe import _held, _memory
from terrella.launch.settings.base import Lora, OnPolicy
from terrella.models.geometry import GEOMETRIES, adapter_parameters
from terrella.tests.golden.observe import comparable
from terrella.tests.golden.play import CASES
from terrella.tests.parallel.recipe_jobs import run_case


def own_data(**algorithm: float) -> recipe.Recipe:
    """A case without its evaluation, whose RL stage does not report the divergence."""
    whole = recipe.load(str(CASES / "own-data.yaml"))
    stages = [
        replace(
            stage, rollouts=replace(stage.rollouts, report_kl=False), algorithm=replace(stage.algorithm, **algorithm)
        )
        if isinstance(stage, OnPolicy)
        else stage
        for stage in whole.stages[:3]
    ]
    return replace(whole, stages=stages)


def reporting(whole: recipe.Recipe) -> recipe.Recipe:
    rl = whole.stages[-1]
    assert isinstance(rl, OnPolicy)
    return replace(whole, stages=[*whole.stages[:-1], replace(rl, rollouts=replace(rl.rollouts, report_kl=True))])


@pytest.mark.timeout(900)
def test_rl_without_kl_builds_no_reference_and_trains_the_same(tmp_path: Path) -> None:
    steps, rows = {}, {}
    for name, config in {"plain": own_data(), "reports": reporting(own_data()), "term": own_data(kl_coef=0.1)}.items():
        steps[name] = run_case(config, tmp_path / "runs" / name)
        rows[name] = comparable(MetricsFile(tmp_path / "runs" / name / "metrics.jsonl").rows())
    # one engine that only scores writes the start's checkpoint; the reference is a second
    assert {name: seen[-1]["frozen"] for name, seen in steps.items()} == {"plain": 1, "reports": 2, "term": 2}
    for one, other in zip(steps["plain"], steps["reports"], strict=True):
        assert one["norm"] == other["norm"]
        assert all(torch.equal(weight, other["weights"][key]) for key, weight in one["weights"].items())
    kl = [row.pop("kl", None) for row in rows["reports"] if row["stage"] == "rl"]
    assert len(kl) == 2 and None not in kl and rows["plain"] == rows["reports"]
    assert all("kl" in row for row in rows["term"] if row["stage"] == "rl")


def test_memory_is_foreseen_for_a_reference_where_there_is_one() -> None:
    texts = [next(_memory(config)).text for config in (own_data(), reporting(own_data()), own_data(kl_coef=0.1))]
    assert ["reference" in text for text in texts] == [False, True, True]


def test_memory_is_foreseen_for_adapters_alone_where_they_alone_are_trained() -> None:
    # what PEFT says of all linear layers of Qwen2.5-1.5B at rank 16
    assert adapter_parameters(GEOMETRIES["qwen2.5-1.5b"], 16) == 18_464_768
    whole = own_data()
    adapted = replace(whole, stages=[replace(s, lora=Lora(rank=2)) if hasattr(s, "lora") else s for s in whole.stages])
    full, alone = ({s.name: _held(config, s) for s in config.stages[1:]} for config in (whole, adapted))
    for name in full:
        assert alone[name]["optimizer"] < full[name]["optimizer"] / 2
        assert alone[name]["activations"] == full[name]["activations"]
        assert ("merged weights" in alone[name]) == (name == "rl")
