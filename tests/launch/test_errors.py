"""Errors that are not ours are named, and end a run for good where another start would meet them again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from terrella.core.errors import ProgramError, TerrellaError, WorkerError, describe_error, is_transient
from terrella.launch import cli, supervise
from terrella.launch.slurm.render import JOB_SHELL
from terrella.models.families import read_hf_config

SLURM = JOB_SHELL


def left(run: Path, rank: int, **error: object) -> None:
    supervise.error_file(run, rank).parent.mkdir(exist_ok=True)
    supervise.error_file(run, rank).write_text(json.dumps(error))


def test_a_crash_that_would_come_again_is_told_as_one(tmp_path: Path) -> None:
    left(tmp_path, 0, message="RuntimeError: Connection closed by peer", exit_code=1, order=1.0, passing=True)
    left(tmp_path, 1, message="KeyError: 'reward' at rl/loop.py:7", exit_code=10, order=2.0, passing=False)
    with pytest.raises(ProgramError, match=r"worker 1: KeyError: 'reward' at rl/loop.py:7; its log is .*rank-1.log"):
        supervise._verdict(tmp_path, {0: 1, 1: 10})
    left(tmp_path, 1, message="a setting", exit_code=2, order=2.0)
    with pytest.raises(TerrellaError, match=r"^a setting$") as error:
        supervise._verdict(tmp_path, {0: 1, 1: 2})
    assert error.value.exit_code == 2


def test_a_passing_crash_keeps_its_cause(tmp_path: Path) -> None:
    left(
        tmp_path, 0, message="RuntimeError: CUDA error: an illegal memory access", exit_code=1, order=1.0, passing=True
    )
    with pytest.raises(WorkerError, match=r"worker 0 ended with code 1 \(RuntimeError: CUDA error.*Nothing is lost"):
        supervise._verdict(tmp_path, {0: 1})


def test_which_errors_pass() -> None:
    for error in (
        ConnectionResetError("x"),
        MemoryError(),
        RuntimeError("[gloo] Connection closed by peer"),
        RuntimeError("NCCL error"),
    ):
        assert is_transient(error)
    for error in (
        KeyError("x"),
        TypeError("x"),
        RuntimeError("shape '[2]' is invalid"),
        AssertionError(),
        IndexError("x"),
    ):
        assert not is_transient(error)
    try:
        {}["x"]
    except KeyError as error:
        assert describe_error(error).startswith("KeyError: 'x' at launch/test_errors.py:")


def test_a_worker_leaves_the_cause_of_any_error(tmp_path: Path) -> None:
    """A run directory whose config is no recipe: the worker itself is run."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "config.yaml").write_text("name: x\n")
    environment = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "TERRELLA_LEASE": "x",
    }
    environment[supervise.PARENT_VARIABLE] = str(os.getpid())
    done = subprocess.run(
        [sys.executable, "-m", "terrella.launch.worker", str(tmp_path)],
        env=environment,
        capture_output=True,
        timeout=600,
    )
    told = json.loads(supervise.error_file(tmp_path, 0).read_text())
    assert done.returncode == told["exit_code"] == 2 and "is missing" in told["message"]


def test_jobs_requeue_neither_settings_nor_errors_of_the_program() -> None:
    assert '2 | 3 | 4 | 6 | 10) exit "$code"' in SLURM.read_text()


def test_the_command_shows_no_bare_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, code, said in (
        (KeyError("x"), 10, "an error of the program: KeyError: 'x' at"),
        (PermissionError(13, "Permission denied", "/a/b"), 3, "/a/b: Permission denied"),
        (ConnectionRefusedError(111, "Connection refused"), 3, "terrella: error: Connection refused"),
    ):

        def fail(error: Exception = error, **_: object) -> None:
            raise error

        monkeypatch.setattr(cli.cli, "main", fail)
        with pytest.raises(SystemExit) as ended:
            cli.main(["doctor"])
        assert ended.value.code == code and said in capsys.readouterr().err


GOOD = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}


@pytest.mark.parametrize(
    "change",
    [
        *({key: value} for key in GOOD if key != "model_type" for value in (None, "x", [], {}, -1, 0)),
        {"rope_scaling": [1]},
        {"rope_scaling": "x"},
        {"rope_parameters": 3},
        {"rope_scaling": {"type": "yarn"}},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"model_type": []},
    ],
)
def test_a_config_that_makes_no_sense_is_named(change: dict) -> None:
    read_hf_config(GOOD)
    try:
        read_hf_config({**GOOD, **change}, "config.json")
    except TerrellaError as error:
        assert str(error).startswith("config.json: ")
    else:
        assert change in (
            {"num_key_value_heads": None},
            {"num_key_value_heads": 0},
            {"num_key_value_heads": []},
            {"num_key_value_heads": {}},
        )


@pytest.mark.parametrize("held", [[], 3, "x", None])
def test_a_config_that_is_no_object_is_named(held: object) -> None:
    with pytest.raises(TerrellaError, match="must hold a JSON object"):
        read_hf_config(held)  # type: ignore[arg-type]
