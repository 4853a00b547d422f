"""Checkpoints: resume equal to the bit, other layouts, damage named, never a half one."""

from __future__ import annotations

import math
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from terrella.core.checkpoint import CheckpointReader
from terrella.core.errors import StorageError
from terrella.tests.core import saver
from terrella.tests.parallel.pool import run_ranks
from terrella.tests.sampling import in_turn, sampled

JOBS = "terrella.tests.core.checkpoint_jobs"
# steps, of which three come before the checkpoint; where all states are compared to the bit, later ones tell no more
TOTAL, OTHERWISE = 9, 23

RESUMES = {
    "dp2": (2, {}, "fp32", True),
    "dp2-bf16-async": (2, {}, "bf16", False),
    "tp2-async": (2, {"tensor": 2}, "fp32", False),
    "pp2-async": (2, {"pipeline": 2}, "fp32", False),
    "dp2-overlap": (2, {"overlap_param_gather": True}, "fp32", False),
    "vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}, "fp32", True),
}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param("dp2", marks=pytest.mark.full),
        *("dp2-bf16-async", "dp2-overlap", "vpp2"),
        *sampled(["tp2-async", "pp2-async"], 1),
    ],
)
def test_resume_is_bit_equal(tmp_path: Path, row: str) -> None:
    world, parallel, precision, wait = RESUMES[row]
    common = {"folder": str(tmp_path / "step_00000003"), "parallel": parallel, "precision": precision, "total": TOTAL}
    whole = run_ranks(f"{JOBS}:train_and_save", world, at=3, wait=wait, **common)
    again = run_ranks(f"{JOBS}:resume", world, **common)
    for before, after in zip(whole, again, strict=True):
        assert after["trace"] == before["trace"][3:]
        assert after["step"] == TOTAL
        assert before["states"].keys() == after["states"].keys()
        for name, value in before["states"].items():
            assert torch.equal(_bits(value), _bits(after["states"][name])), name


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.view(torch.int16 if value.dtype == torch.bfloat16 else torch.int32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list]:
    folder = tmp_path_factory.mktemp("run") / "step_00000003"
    results = run_ranks(f"{JOBS}:train_and_save", 2, folder=str(folder), parallel={}, at=3, total=OTHERWISE)
    return folder, results[0]["trace"]


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        pytest.param(1, {}, id="tp1"),
        pytest.param(2, {"tensor": 2}, id="tp2"),
        pytest.param(2, {"pipeline": 2}, id="pp2"),
        pytest.param(
            4, {"tensor": 2, "sequence_parallel": True, "context": 2}, id="tp2_sp_cp2", marks=pytest.mark.full
        ),
    ],
)
def test_resume_in_another_layout(saved: tuple[Path, list], tmp_path: Path, world: int, parallel: dict) -> None:
    folder, trace = saved
    run_ranks(f"{JOBS}:resave", world, folder=str(folder), other=str(tmp_path / "again"), parallel=parallel)
    before, after = CheckpointReader(folder), CheckpointReader(tmp_path / "again")
    assert before.names() == after.names()
    assert before.extra == after.extra
    for name in before.names():
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            assert torch.equal(_bits(before.full(name, kind)), _bits(after.full(name, kind))), f"{name} {kind}"
    results = run_ranks(f"{JOBS}:resume", world, folder=str(folder), parallel=parallel, total=OTHERWISE)[0]
    losses = [abs(a[0] - b[0]) / abs(b[0]) for a, b in zip(results["trace"], trace[3:], strict=True)]
    assert losses[0] <= 1e-6
    assert max(losses) <= 1e-5
    for name, value in results["loaded"].items():
        assert torch.equal(value, before.full(name)), name


@pytest.mark.parametrize(
    ("world", "parallel"),
    [(2, {}), (2, {"tensor": 2}), (4, {"tensor": 2}), (4, {"tensor": 2, "sequence_parallel": True, "pipeline": 2})],
    ids=["dp2", "tp2", "tp2_dp2", "tp2_pp2"],
)
def test_a_rank_reads_its_own_share_of_a_checkpoint(tmp_path: Path, world: int, parallel: dict) -> None:
    """Of weights and moments all ranks together read each byte about once, and of weights alone every rank its part;
    norms, which tensor ranks hold twice, are the rest.
    """
    folder = tmp_path / "step_00000001"
    run_ranks(f"{JOBS}:train_and_save", world, folder=str(folder), parallel=parallel, at=1, total=1)
    reader = CheckpointReader(folder)
    payload = 3 * 4 * sum(math.prod(reader.shape(name)) for name in reader.names())  # weights and both moments in fp32
    read = run_ranks(f"{JOBS}:bytes_read", world, folder=str(folder), parallel=parallel)
    assert payload <= sum(r["read"] for r in read) <= 1.1 * payload
    assert max(r["read"] for r in read) <= 1.5 * payload / world  # the first stage of a pipeline has the embedding
    weights = run_ranks(f"{JOBS}:bytes_read", world, folder=str(folder), parallel=parallel, weights_only=True)
    assert all(r["read"] == r["own"] for r in weights)


def test_random_states_come_back_where_ranks_hold_the_same(saved: tuple[Path, list]) -> None:
    """Settings that move nothing between ranks, and ones that a later release added, do not matter; another layout
    starts afresh.
    """
    folder = str(saved[0])
    same, later = (
        run_ranks(f"{JOBS}:generator_after", 2, folder=folder, parallel=p)[0] for p in ({}, {"timeout_minutes": 7.0})
    )
    other = run_ranks(f"{JOBS}:generator_after", 2, folder=folder, parallel={"tensor": 2})[0]
    assert torch.equal(same, later) and not torch.equal(same, other)


@in_turn("key heads")
def test_a_checkpoint_moves_between_ranks_that_share_key_heads(tmp_path: Path) -> None:
    """Two heads for four ranks: resumed to the bit by the same ranks, and from and to two ranks and one with the same
    weights and moments.
    """
    folder = tmp_path / "step_00000002"
    common = {"folder": str(folder), "parallel": {"tensor": 4}, "total": 6}
    before = run_ranks(f"{JOBS}:train_and_save", 4, at=2, **common)
    for one, other in zip(before, run_ranks(f"{JOBS}:resume", 4, **common), strict=True):
        assert other["trace"] == one["trace"][2:]
        for name, value in one["states"].items():
            assert torch.equal(_bits(value), _bits(other["states"][name])), name
    stored, previous = CheckpointReader(folder), folder
    for number, tensor in enumerate((1, 4, 2, 4)):
        parallel, other = {"tensor": tensor}, tmp_path / f"again-{number}"
        run_ranks(f"{JOBS}:resave", tensor, folder=str(previous), other=str(other), parallel=parallel)
        found, previous = CheckpointReader(other), other
        for name in stored.names():
            for kind in ("master", "exp_avg", "exp_avg_sq"):
                assert torch.equal(_bits(stored.full(name, kind)), _bits(found.full(name, kind))), f"{name} {kind}"
    for tensor in (1, 2):
        found = run_ranks(f"{JOBS}:resume", tensor, folder=str(folder), parallel={"tensor": tensor}, total=6)[0]
        losses = [abs(a[0] - b[0]) / abs(b[0]) for a, b in zip(found["trace"], before[0]["trace"][2:], strict=True)]
        assert losses[0] <= 1e-6 and max(losses) <= 1e-5


def test_experts_move_between_layouts(tmp_path: Path) -> None:
    """Saved by two expert ranks, loaded by one and by two tensor ranks: the same weights and moments, to the bit."""
    run_ranks(f"{JOBS}:train_experts", 2, folder=str(tmp_path / "ep2"), parallel={"expert": 2})
    before = CheckpointReader(tmp_path / "ep2")
    for world, parallel in ((1, {}), (2, {"tensor": 2, "sequence_parallel": True})):
        other = tmp_path / f"world{world}"
        run_ranks(
            f"{JOBS}:resave", world, folder=str(tmp_path / "ep2"), other=str(other), parallel=parallel, kind="moe"
        )
        after = CheckpointReader(other)
        assert before.names() == after.names()
        for name in before.names():
            for kind in ("master", "exp_avg", "exp_avg_sq"):
                assert torch.equal(_bits(before.full(name, kind)), _bits(after.full(name, kind))), f"{name} {kind}"


def test_a_flipped_byte_is_named(saved: tuple[Path, list], tmp_path: Path) -> None:
    copy = tmp_path / "step_00000003"
    shutil.copytree(saved[0], copy)
    shard = copy / "shard_00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-7] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(StorageError, match=r"shard_00001\.safetensors: damaged"):
        CheckpointReader(copy)
    for message in run_ranks(f"{JOBS}:load_error", 2, folder=str(copy), parallel={}):
        assert "shard_00001.safetensors: damaged" in message
    shard.unlink()
    with pytest.raises(StorageError, match=r"shard_00001\.safetensors: missing"):
        CheckpointReader(copy)


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_of_any_rank_is_said_by_all_at_once_and_leaves_nothing(tmp_path: Path, full: int) -> None:
    told = run_ranks(
        f"{JOBS}:save_without_space_on", 2, deadline_s=120, folder=str(tmp_path / "step_00000003"), full=full
    )
    for message, seconds in told:
        assert f"shard_0000{full}.safetensors" in message and "free space" in message and seconds < 60, (
            message,
            seconds,
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("slow", [0, 1])
def test_ranks_wait_for_the_slowest_file_beyond_the_timeout_of_a_collective(tmp_path: Path, slow: int) -> None:
    run_ranks(f"{JOBS}:save_slowly", 2, deadline_s=120, folder=str(tmp_path / "step_00000000"), slow=slow)
    assert CheckpointReader(tmp_path / "step_00000000").names()


def kill_during_save(root: Path, times: int, seed: int) -> None:
    """Kill a process that saves checkpoint after checkpoint; what is left must load and be whole."""
    draw = random.Random(seed)
    command = [sys.executable, "-m", "terrella.tests.core.saver", str(root)]
    for _ in range(times):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            assert process.stdout.readline().strip() == "saving"
            limit = time.monotonic() + 120
            while not saver.steps(root):  # kills before the first whole one would prove nothing
                assert time.monotonic() < limit
                time.sleep(0.02)
            time.sleep(draw.uniform(0.0, 0.4))
        finally:
            process.kill()
            process.wait(300)
        for step in saver.steps(root):
            reader = CheckpointReader(saver.path(root, step))
            weight = reader.full("weight")
            assert torch.equal(weight, torch.full_like(weight, float(step)))
            assert reader.extra == {"step": step}


def test_kill_during_save(tmp_path: Path) -> None:
    kill_during_save(tmp_path, 2, seed=1)
    assert saver.steps(tmp_path)


@pytest.mark.full
def test_kill_during_save_at_twenty_points(tmp_path: Path) -> None:
    kill_during_save(tmp_path, 20, seed=2)
    assert saver.steps(tmp_path)
