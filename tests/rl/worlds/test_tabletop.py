"""The table-top scene in MuJoCo: determinism, snapshots, graded policies, and the detector against the true state."""

import importlib.util

import numpy as np
import pytest

from terrella.data.shards import ShardSet
from terrella.rl.video.clips import Episodes
from terrella.rl.video.detector import look, succeeded
from terrella.rl.video.record import EpisodePlan, plans, play, record
from terrella.rl.worlds.tabletop import TASKS, Table, Tabletop

# not imported here: how it draws is chosen by the world before the import
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(importlib.util.find_spec("mujoco") is None, reason="MuJoCo is not installed"),
]


@pytest.fixture(scope="module")
def world() -> Tabletop:
    return Tabletop()


def test_same_seed_same_episode_and_snapshots_restore(world: Tabletop) -> None:
    def run(seed: int, steps: int = 5) -> list:
        world.reset(seed, "push")
        out = [world.frame()]
        for i in range(steps):
            world.step(np.array([0.03, 0.01 * i, 0.0]))
            out.append(world.frame())
        return out

    a, b = run(3), run(3)
    assert all((x == y).all() for x, y in zip(a, b, strict=True))
    assert not (run(4)[0] == a[0]).all()
    run(3, 2)
    held = world.snapshot()
    world.step(np.array([0.04, 0.04, 0.0]))
    after, scene = world.frame(), world.scene()
    world.restore(held)
    world.step(np.array([0.04, 0.04, 0.0]))
    assert (world.frame() == after).all() and world.scene() == scene


def test_policies_are_graded_and_the_detector_agrees() -> None:
    wins, agree, total = {}, 0, 0
    for policy in ("scripted", "random"):
        for task in TASKS:
            for seed in range(6):
                frames, actions, success = play(EpisodePlan(seed, task, policy, 28))
                assert frames.shape == (28, 64, 64, 3) and actions.shape == (28, 3)
                wins[policy] = wins.get(policy, 0) + success
                agree += succeeded(task, frames[-1], frames[0]) == success
                total += 1
    assert wins["scripted"] >= 12 and wins["random"] <= 2, wins
    assert agree >= total - 1


def test_a_longer_stride_and_larger_things_move_more_and_are_solved_too() -> None:
    moved, wins, agree, table = [], {"scripted": 0, "random": 0}, 0, Table(stride=3, large=True)
    for policy in wins:
        for task in TASKS:
            for seed in range(3):
                frames, actions, success = play(EpisodePlan(seed, task, policy, 14, table))
                wins[policy] += success
                agree += succeeded(task, frames[-1], frames[0]) == success
                assert np.abs(actions[:, :2]).max() <= table.reach + 1e-6
    for other in (Table(), table):
        frames, _, _ = play(EpisodePlan(1, "push", "random", 8, other))
        moved.append(np.abs(frames[1:].astype(float) - frames[0]).mean())
    assert moved[1] > 1.5 * moved[0], moved
    assert wins["scripted"] >= 6 and wins["random"] <= 1, wins
    assert agree >= 17


def test_positions_are_read_within_a_centimetre(world: Tabletop) -> None:
    errors = []
    for seed in range(8):
        world.reset(seed, "close")
        seen, true = look(world.frame()), world.scene()
        errors += [
            np.abs(seen.pusher - true.pusher).max(),
            np.abs(seen.block - true.block).max(),
            abs(seen.drawer - true.drawer),
        ]
    assert np.mean(errors) < 0.006 and np.max(errors) < 0.02


@pytest.mark.parametrize(("height", "width"), [(128, 128), (256, 320)])
def test_other_sizes(height: int, width: int) -> None:
    world = Tabletop(Table(height, width))
    world.reset(0, "open")
    assert world.frame().shape == (height, width, 3) and world.frame().std() > 10
    world.close()


def test_recorded_shards_do_not_depend_on_workers(tmp_path) -> None:
    wanted = list(plans(6, 50, ["push", "open"], ["noisy"], 4, Table()))
    assert record(tmp_path / "a", wanted, 0) == 6 and record(tmp_path / "b", wanted, 2) == 6
    names = [sorted(p.name for p in (tmp_path / f).glob("*.tar")) for f in "ab"]
    assert names[0] == names[1]
    assert all((tmp_path / "a" / n).read_bytes() == (tmp_path / "b" / n).read_bytes() for n in names[0])
    sample = ShardSet(tmp_path / "a")[0]
    assert sample["meta.json"]["task"] == "push" and isinstance(sample["meta.json"]["success"], bool)
    assert sample["instruction.txt"] == TASKS["push"]
    episodes = Episodes(tmp_path / "a")
    frames, actions, _ = play(wanted[3])
    assert (episodes.frames(3, range(4)) == frames).all() and np.allclose(episodes.actions(3, range(4)), actions)
    assert (episodes.frames(3, [9])[0] == frames[-1]).all()  # beyond the end the last frame is repeated
