"""Cases of the training benchmark by name and by geometry."""

from typing import Any

import pytest

from terrella.benchmarks import trainers
from terrella.benchmarks.train import CASES, IMPLEMENTATIONS, find_case, mean_length
from terrella.core.config import PrecisionConfig
from terrella.models.geometry import GEOMETRIES


def test_a_case_is_a_name_or_a_size_of_the_planner() -> None:
    assert find_case("tiny 4x64") == CASES["tiny 4x64"]
    model, lengths = find_case("llama3-70b/2 1x4096")
    assert (model.layers, model.hidden, lengths) == (2, 8192, [4096])
    for size in ("0.1b", "qwen2.5-7b", "llama3-70b"):
        model, lengths = find_case(f"{size} 2x1024")
        assert model == GEOMETRIES[size] and lengths == [1024, 1024]
        assert mean_length(lengths) == 1024
    model, lengths = find_case("qwen3-30b-a3b/6 4x4096")
    assert (model.family, model.layers, model.experts, model.qk_norm) == ("qwen3_moe", 6, 128, True)
    assert mean_length([1, 3]) == 2.5
    for bad in ("llama3-70b", "qwen3-30b 1x8", "9b 1x8", "0.1b 1y8"):
        with pytest.raises(ValueError, match="nor SIZE"):
            find_case(bad)


def test_the_name_of_an_implementation_says_its_format(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, PrecisionConfig] = {}

    def made(model: Any, lengths: Any, formats: dict[str, Any], regime: str, graphs: bool) -> Any:
        found[name] = PrecisionConfig("bf16", **formats)

    monkeypatch.setattr(trainers, "ours", made)
    for name in [impl for impl in IMPLEMENTATIONS if impl.startswith("terrella")]:
        trainers.make_step(name, "master", *CASES["tiny 4x64"])
    plain = PrecisionConfig("bf16")
    assert found["terrella"] == found["terrella graphs"] == plain
    assert (found["terrella TE fp8"].layers, found["terrella TE fp8"].fp8) == ("te", True)
    formats = {
        "": ("dgrad", False),
        " forward": ("forward", False),
        " all": ("all", False),
        " + head": ("dgrad", True),
        " all + head": ("all", True),
    }
    ours = {name.removeprefix("terrella fp8"): p for name, p in found.items() if name.startswith("terrella fp8")}
    assert {name: (p.fp8_products, p.fp8_head) for name, p in ours.items()} == formats
