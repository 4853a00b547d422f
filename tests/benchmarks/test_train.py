"""Cases of the training benchmark by name and by geometry."""

import pytest

from terrella.benchmarks.train import CASES, find_case, mean_length
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
