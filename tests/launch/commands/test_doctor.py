"""Damage of every kind is found, named and given a fix; a healthy run is left in peace."""

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from terrella.core.errors import TerrellaError
from terrella.core.health import BEAT_S
from terrella.data.schema import TRANSITION
from terrella.data.shards import ShardWriter
from terrella.launch.commands.doctor import doctor

STEP_S = 0.5


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that is being written now, with healthy numbers and one folder of shards."""
    path = tmp_path / "run"
    for name in ("logs", "checkpoints", "stages"):
        (path / name).mkdir(parents=True)
    (path / "config.yaml").write_text("name: x\n")
    (path / "lease.json").write_text(json.dumps({"token": "t", "incarnation": 1, "host": "n1", "pid": 1}))
    rows = [{"stage": "sft", "step": i + 1, "loss": 1.0, "time/step_s": STEP_S} for i in range(20)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with ShardWriter(path / "stages" / "play" / "shards", kind=TRANSITION, max_samples=4) as writer:
        for i in range(6):
            writer.write({"transition.json": {"schema": TRANSITION, "state": f"s{i}", "action": 1, "next_state": "n"}})
    return path


def ask(*paths: Path) -> tuple[str, bool]:
    done = CliRunner().invoke(doctor, [str(p) for p in paths])
    assert done.exception is None or isinstance(done.exception, TerrellaError | SystemExit), done.exception
    return done.output, done.exception is not None


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_a_healthy_run_has_no_failure(run: Path) -> None:
    text, failed = ask(run)
    assert not failed, text
    assert "sft at step 20, 0.50 s each" in text and "6 samples in 2 shards, all whole" in text


def test_a_dead_owner_and_a_stuck_run(run: Path) -> None:
    age(run / "metrics.jsonl", 600)
    now = time.time()
    for rank, at in enumerate(
        ["engine.py:step:90 in all_reduce", "episodes.py:play:40", "engine.py:step:90 in all_reduce"]
    ):
        beat = {"at": at, "since": now - 500, "time": now, "host": f"n{rank}", "pid": 1}
        (run / "logs" / f"rank-{rank}.alive.json").write_text(json.dumps(beat))
    text, failed = ask(run)
    assert failed and "it is stuck" in text
    assert "2 ranks, first 0: at engine.py:step:90 in all_reduce" in text and "rank 1: at episodes.py:play:40" in text
    beat = json.loads((run / "logs" / "rank-2.alive.json").read_text())
    (run / "logs" / "rank-2.alive.json").write_text(json.dumps({**beat, "time": now - 6 * BEAT_S}))
    assert "[2] on n2 gave no sign" in ask(run)[0]
    age(run / "lease.json", 100)
    text, failed = ask(run)
    assert failed and "start the same command again" in text


def test_slow_and_diverging(run: Path) -> None:
    rows = [
        {"stage": "rl", "step": i + 1, "time/step_s": 1.0 if i < 30 else 2.0, "time/rollout_s": 0.9} for i in range(36)
    ]
    rows[-1]["loss"] = "nan"
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text, failed = ask(run)
    assert failed and "loss is not a finite number at step 36" in text
    assert "1.5 x slower" in text and "90 % of a step is sampling" in text


def test_what_the_workers_left_is_shown(run: Path) -> None:
    (run / "logs" / "rank-3.error.json").write_text(json.dumps({"message": "loss is nan at step 4", "exit_code": 6}))
    (run / "logs" / "crashes").write_text("12 7\n12 137\n")
    text, failed = ask(run)
    assert (
        failed
        and "rank-3: loss is nan at step 4" in text
        and "exit code 6" in text
        and "2 crashes of cluster jobs, the last with code 137" in text
    )


def test_what_a_full_disk_left_torn_is_a_finding_beside_the_others(run: Path) -> None:
    (run / "logs" / "rank-3.error.json").write_text('{"mess')
    (run / "logs" / "crashes").write_text("")
    text, failed = ask(run)
    assert failed and "rank-3.error.json: not a JSON file" in text and "finished stages" in text


def test_damaged_shards_and_checkpoints_are_named(run: Path, tmp_path: Path) -> None:
    shard = sorted((run / "stages" / "play" / "shards").glob("*.tar"))[0]
    data = bytearray(shard.read_bytes())
    data[600] ^= 1
    shard.write_bytes(bytes(data))
    text, failed = ask(run)
    assert failed and "terrella shards verify --quarantine" in text
    folder = tmp_path / "step-000001"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"format": "other", "files": {}}))
    text, failed = ask(folder)
    assert failed and "checkpoint format" in text


def test_paths_that_are_nothing(tmp_path: Path) -> None:
    text, failed = ask(tmp_path / "absent", tmp_path)
    assert failed and "no such file or folder" in text and "neither a run directory" in text


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    text, _ = ask()
    assert (
        "arithmetic: an integer product is exact" in text
        and "kernels: log-probs agree" in text
        and "versions: python" in text
    )


def test_gpus_that_slurm_gave_and_the_driver_does_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "0, NVIDIA H100 80GB HBM3, 81559, 3, 31, 0, P0\n1, NVIDIA GB10, [N/A], [N/A], 31, 0, P0\n"
    said = {"nvidia-smi": rows, "dmesg": "", "dcgmi": "| Deployment | Pass |\n"}
    for name, text in said.items():
        (tmp_path / name).write_text(f"#!/bin/bash\ncat <<'END'\n{text}END\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def look() -> tuple[str, bool]:
        done = CliRunner().invoke(doctor, ["--gpus"])
        assert done.exception is None or isinstance(done.exception, TerrellaError), done.exception
        return done.output, done.exception is not None

    text, failed = look()
    assert not failed and "gpu 1: NVIDIA GB10, 31 C" in text, text
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    text, failed = look()
    assert failed and "the driver shows 2 of the 4 that SLURM gave this job" in text, text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-3b5,MIG-9c1")
    assert not look()[1]
