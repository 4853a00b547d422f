"""Real2Sim on recorded episodes: which are taken, what policies and judges may answer, the file of true rates, and
intervals of the agreement.
"""

from pathlib import Path

import numpy as np
import pytest

from terrella.core.by_path import ByPath
from terrella.core.errors import ConfigError
from terrella.rl.video import recorded
from terrella.rl.video.clips import Episodes, copy_small
from terrella.rl.video.real2sim import Rate, agreement_cells
from terrella.tests.rl.video.drawers import write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mine")
    write_folder(made, 24, 32)
    return made


def test_episodes_are_found_by_what_the_robot_was_told(folder: Path) -> None:
    held = Episodes(folder / "shards", every=2, heldout=True)
    found = recorded.find_episodes(held, ["open * drawer", "close top drawer"], 2, "stages: sim")
    assert found == {"open * drawer": [0, 1], "close top drawer": [2, 5]}
    one = recorded.recording(held, 2, 24, 32)
    assert one.instruction == "close top drawer" and one.frames_THW3.shape == (6, 24, 32, 3)
    assert one.actions_TA.shape == (6, 13) and one.actions_TA[-1, 7:10].tolist() == [1, 0, 0]
    with pytest.raises(
        ConfigError, match="stages: sim: 2 of the 6 episodes have the instruction 'close top drawer', 3"
    ):
        recorded.find_episodes(held, ["close top drawer"], 3, "stages: sim")
    with pytest.raises(ConfigError, match=r"its frames are 24 x 32, env\.tokenizer has 24 x 40"):
        recorded.recording(held, 2, 24, 40)


def test_small_copies_keep_what_was_told_and_done(folder: Path, tmp_path: Path) -> None:
    source = Episodes(folder / "shards")
    copy_small(source, [4, 1], tmp_path / "small", 8, 3)
    small = Episodes(tmp_path / "small")
    assert len(small) == 2 and small.length(0) == 3
    assert recorded.instruction_of(small.raw(0)) == recorded.instruction_of(source.raw(4)) == "close top drawer"
    assert np.array_equal(small.frames(0, [2])[0], source.frames(4, [2])[0][::3, ::4])
    assert np.array_equal(small.actions(1, range(3)), source.actions(1, range(3)))


def own(folder: Path, name: str) -> ByPath:
    return ByPath(f"{folder}/policies.py:{name}")


def test_policies_of_ones_own_are_made_and_checked(folder: Path) -> None:
    frame = np.zeros((24, 32, 3), np.uint8)
    skilled = recorded.player(own(folder, "Skilled"), 13)
    skilled.reset(0)
    said = [skilled.act(frame, "close top drawer") for _ in range(3)]
    assert said[0].tolist() == [0.0] * 7 + [0.0, 1.0, 0.0, 0.0, 0.0, -1.0] and said[2][7:10].tolist() == [1, 0, 0]
    recorded.player(own(folder, "Idle"), 13).reset(0)  # has none
    for name, message in (
        ("Short", r"policies\.py:Short: act must give 13 finite numbers"),
        ("NoEnd", "act: the part terminate_episode is missing"),
    ):
        with pytest.raises(ConfigError, match=message):
            recorded.player(own(folder, name), 13).act(frame, "x")
    with pytest.raises(ConfigError, match=r"act failed: .*line"):
        recorded.player(own(folder, "Idle"), 13).act(frame.astype(float), "x")
    with pytest.raises(ValueError, match="'wrist' is no part of RT-1's actions"):
        recorded.join_parts({"wrist": 1})
    with pytest.raises(ConfigError, match="'weak' plays the table-top scene"):
        recorded.require_own([own(folder, "Idle"), "weak"], "stages: sim.policies")


def test_judges(folder: Path) -> None:
    held = Episodes(folder / "shards")
    for number in range(len(held)):
        one = recorded.recording(held, number, 24, 32)
        for judge in (None, ByPath(f"{folder}/judge.py:moved")):
            assert recorded.verdict(judge, one.frames_THW3, one)
            assert not recorded.verdict(judge, one.frames_THW3[:1], one)
    with pytest.raises(ConfigError, match=r"unsure: must say True or False, not 0\.5"):
        recorded.verdict(ByPath(f"{folder}/judge.py:unsure"), one.frames_THW3, one)


def test_true_rates(folder: Path, tmp_path: Path) -> None:
    rates = recorded.read_rates(str(folder / "real.yaml"), ["open * drawer", "close * drawer"], ["Skilled", "Idle"])
    assert rates["open * drawer/Skilled"] == Rate(20 / 27, 27) and rates["close * drawer/Skilled"] == Rate(0.889)
    with pytest.raises(ConfigError, match="no value for the task 'open \\* drawer' and the policy 'Weak'"):
        recorded.read_rates(str(folder / "real.yaml"), ["open * drawer"], ["Weak"])
    for value in ("81.5", "[3, 2]", "[1.0, 2]", "true", "-0.1"):
        (tmp_path / "wrong.yaml").write_text(f"open: {{A: {value}}}")
        with pytest.raises(ConfigError, match="must be a rate of 0 to 1, or \\[successes, episodes\\]"):
            recorded.read_rates(str(tmp_path / "wrong.yaml"), ["open"], ["A"])
    with pytest.raises(ConfigError, match="cannot be read"):
        recorded.read_rates(str(tmp_path / "none.yaml"), [], [])


def test_intervals_shrink_with_the_episodes_and_hold_the_value() -> None:
    real = [Rate(v) for v in (0.0, 0.519, 0.704, 0.815)]
    model = (0.033, 0.333, 0.6, 0.7)
    widths = []
    for n in (30, 3000):
        cells = agreement_cells(real, [Rate(round(v * n) / n, n) for v in model], 0)
        assert all(cell["low"] <= cell["value"] <= cell["high"] for cell in cells) and cells[0]["n"] == 4 * n
        widths.append([cell["high"] - cell["low"] for cell in cells])
    assert all(few > 5 * many for few, many in zip(*widths, strict=True) if many) and widths[0][0] < 0.5
    exact = agreement_cells(real, [Rate(0.5)] * 4, 0)
    assert exact[0] == "no spread" and exact[1]["low"] == exact[1]["high"] == exact[1]["value"]


def test_intervals_hold_what_made_the_episodes() -> None:
    real, truth = [Rate(v) for v in (0.2, 0.5, 0.5, 0.8)], [0.5, 0.4, 0.6, 0.6]
    true = [cell["value"] for cell in agreement_cells(real, [Rate(v) for v in truth], 0)]
    rng, held = np.random.default_rng(1), np.zeros(3)
    for seed in range(100):
        cells = agreement_cells(real, [Rate(int(rng.binomial(30, v)) / 30, 30) for v in truth], seed)
        held += [cell["low"] <= value <= cell["high"] for cell, value in zip(cells, true, strict=True)]
    assert (held >= 90).all(), held  # of 100, by r, MMRV and gap
