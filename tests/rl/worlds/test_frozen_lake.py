"""FrozenLake: independent slips, the leak of the coupled stream, the batch, and the coordinate text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrella.rl.worlds.frozen_lake import (
    FrozenLake,
    FrozenLakeConfig,
    coordinate_sentence,
    make_map,
    slip,
    slip_stream,
)
from terrella.tests.rl.worlds.parsed import parse_lake, parse_lake_sentence


def _share_of_slips_told_by_holes(config: FrozenLakeConfig) -> float:
    """How often a hole at row-major cell t goes with a slip to the right at action t."""
    told = []
    for seed in range(123, 251):
        flat = "".join(make_map(config, seed))
        uniforms = slip_stream(config, seed, 0).random(15)
        told += [slip(0, uniforms[t - 1], 1 / 3) == 1 for t in range(1, 11) if flat[t] == "H"]
    return float(np.mean(told))


def test_the_map_tells_the_slips_only_when_coupled() -> None:
    assert _share_of_slips_told_by_holes(FrozenLakeConfig(coupled=True)) > 0.85
    assert _share_of_slips_told_by_holes(FrozenLakeConfig()) == pytest.approx(1 / 3, abs=0.12)


def test_members_of_a_group_slip_independently() -> None:
    streams = [slip_stream(FrozenLakeConfig(), 123, sample).random(50) for sample in range(4)]
    assert len({tuple(s) for s in streams}) == 4
    coupled = [slip_stream(FrozenLakeConfig(coupled=True), 123, sample).random(5) for sample in range(2)]
    assert np.array_equal(*coupled)


def test_slip_rates() -> None:
    uniforms = np.random.default_rng(0).random(30_000)
    for rate in (1 / 3, 0.8, 1.0):
        taken = np.array([slip(2, u, rate) for u in uniforms])
        assert (taken == 2).mean() == pytest.approx(rate, abs=0.01)
        assert (taken == 1).mean() == pytest.approx((1 - rate) / 2, abs=0.01) and not (taken == 0).any()


def test_sentences() -> None:
    assert coordinate_sentence("P___\n_O__\n__G_\nO___") == "Player (0,0); holes at (1,1) and (3,0); goal at (2,2)."
    assert coordinate_sentence("__\n√_") == "Player on goal (1,0)."
    assert coordinate_sentence("XO\nG_") == "Player in hole (0,0); hole at (0,1); goal at (1,0)."
    for bad in ("Player (0,9).", "holes at (0,1).", "Player (0,0); bear at (1,1)."):
        with pytest.raises(ValueError, match=r"outside|players|unknown"):
            parse_lake_sentence(bad, 4)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.integers(2, 8), actions=st.lists(st.integers(1, 4), max_size=12))
def test_text_with_coordinates_round_trips(seed: int, size: int, actions: list[int]) -> None:
    world = FrozenLake(size=size, success_rate=1.0)
    world.reset(seed)
    for action in actions:
        text = world.render("text_with_coordinates")
        assert parse_lake(text) == world.render() == parse_lake_sentence(text.rsplit("\n", 1)[1], size)
        before = world.cell
        result = world.step(action)
        assert result.info["action_is_effective"] == (world.cell != before)
        if result.done:
            assert result.reward == float(result.info["success"])
            break
    with pytest.raises(ValueError, match=r"does not describe|players|outside|unknown"):
        parse_lake(world.render() + "\nPlayer (0,0); goal at (0,0).")


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="success_rate"):
        FrozenLake(success_rate=0.0)
