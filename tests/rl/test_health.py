"""Each alarm sounds when it should, and not before."""

import pytest

from terrella.core.errors import NumericsError
from terrella.data.trajectory import Trajectory
from terrella.rl.health import Health, HealthConfig, repetition, sample_values
from terrella.rl.step_record import describe

CONFIG = HealthConfig(baseline=2, patience=3, on_drift="warn")
GOOD = {
    "reward/std": 0.4,
    "entropy": 1.0,
    "repetition": 0.1,
    "truncated": 0.0,
    "length/mean": 20.0,
    "logprob_drift/mean": 1e-3,
}
BAD = {
    "reward_std": {"reward/std": 0.01},
    "entropy": {"entropy": 0.001},
    "repetition": {"repetition": 0.9},
    "truncated": {"truncated": 0.8},
    "length": {"length/mean": 100.0},
    "drift": {"logprob_drift/mean": 0.05},
}


@pytest.mark.parametrize("name", BAD)
def test_each_alarm_fires_after_its_patience_and_only_then(name: str) -> None:
    health = Health(CONFIG)
    for step in range(4):
        assert health.observe(step, GOOD) == []
    sounded = [[a.name for a in health.observe(4 + i, GOOD | BAD[name])] for i in range(3)]
    assert sounded == [[], [], [name]]
    assert health.observe(7, GOOD) == []


def test_a_stop_reaction_names_the_alarm_and_ignore_is_silent() -> None:
    health = Health(HealthConfig(baseline=1, patience=1, on_entropy="stop", on_repetition="ignore"))
    health.observe(0, GOOD)
    assert health.observe(1, GOOD | BAD["repetition"]) == []
    with pytest.raises(NumericsError, match=r"alarm entropy: the policy is almost deterministic: entropy = 0\.001"):
        health.observe(2, GOOD | BAD["entropy"])


def test_state_survives_a_resume() -> None:
    health, again = Health(CONFIG), Health(CONFIG)
    for step in range(4):
        health.observe(step, GOOD | (BAD["length"] if step > 1 else {}))
    again.load(health.state())
    assert [a.name for a in again.observe(4, GOOD | BAD["length"])] == ["length"]


def test_repetition_and_sample_values() -> None:
    assert repetition([1, 2, 3]) == 0 and repetition(list(range(20))) == 0
    assert repetition([5] * 13) == pytest.approx(9 / 10)
    values = sample_values([[5] * 13, [1, 2, 3]], limit=13)
    assert values == {"repetition": pytest.approx(0.45), "length/mean": 8.0, "truncated": 0.5}


def test_rewards_that_never_differ_sound_the_alarm_too() -> None:
    """From the first step on: there is no spread to compare with. And equal rewards have a spread of exactly 0,
    whatever the rounding.
    """
    trajectories = [Trajectory(0, i, [], 0.1) for i in range(6)]
    spread = describe(trajectories, lambda value: [value])["reward/std"]
    assert spread == 0.0
    health = Health(CONFIG)
    sounded = [[a.name for a in health.observe(step, GOOD | {"reward/std": spread})] for step in range(5)]
    assert sounded == [[], [], [], [], ["reward_std"]]
