"""The run directory: one owner, atomic files, a metrics record that can be cut back."""

import fcntl
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from terrella.core import lease as leases
from terrella.core import run as runs
from terrella.core.errors import ConfigError, DeadlineError, LeaseError, StorageError
from terrella.core.files import read_json, write_atomic
from terrella.core.metrics import MetricsFile
from terrella.tests.golden.observe import comparable


@dataclass(frozen=True)
class Config:
    name: str = "x"
    size: int = 1


def begin(folder: Path, config: Config) -> None:
    run, lease = runs.create(folder, config)
    run.finish("first", {})
    lease.release()


def test_a_run_in_which_nothing_has_begun_takes_other_settings_and_rows(tmp_path: Path) -> None:
    """The start was refused, and its command is given again with the fault mended."""
    folder = tmp_path / "run"
    runs.create(folder, Config())[1].release()
    (folder / runs.ROWS).write_text("{}")
    (folder / "logs" / "rank-0.log").write_text("refused")
    runs.create(folder, Config(size=2))[1].release()
    assert "size: 2" in (folder / "config.yaml").read_text() and not (folder / runs.ROWS).exists()
    (folder / runs.ROWS).write_text("{}")
    (folder / "checkpoints" / "rl").mkdir()
    with pytest.raises(ConfigError, match=r"other settings \(size: 2 then, 3 now\)"):
        runs.create(folder, Config(size=3))
    runs.create(folder, Config(size=2))[1].release()
    assert (folder / runs.ROWS).exists()


def test_same_config_resumes_and_another_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run, lease = runs.create(folder, Config())
    run.finish("first", {"tokens": 3})
    lease.release()
    run, lease = runs.create(folder, Config())
    assert run.outcome("first") == {"tokens": 3} and run.outcome("second") is None
    lease.release()
    with pytest.raises(ConfigError, match=r"other settings \(size: 1 then, 2 now\)"):
        runs.create(folder, Config(size=2))
    assert read_json(folder / "environment.json")["versions"]["python"]


@dataclass(frozen=True)
class Part:
    kind: str = "a"
    rate: float = 0.5


@dataclass(frozen=True)
class Stage:
    name: str
    steps: int = 10


@dataclass(frozen=True)
class Staged(Config):
    stages: tuple[Stage, ...] = ()


def test_settings_of_stages_differ_by_the_stages_names(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    begin(folder, Staged(stages=(Stage("start"), Stage("sft"), Stage("rl", 20))))
    differing = (
        r"\(stages.rl.steps: 20 then, 30 now; stages.export: absent then, there now; stages.sft: there then, absent"
    )
    with pytest.raises(ConfigError, match=differing):
        runs.create(folder, Staged(stages=(Stage("start"), Stage("rl", 30), Stage("export"))))
    with pytest.raises(ConfigError, match=r"\(stages: \['start', 'sft', 'rl'\] then, \['start', 'rl', 'sft'\] now\)"):
        runs.create(folder, Staged(stages=(Stage("start"), Stage("rl", 20), Stage("sft"))))


@dataclass(frozen=True)
class Later(Config):
    """The settings of a later release: three keys more."""

    seed: int = 0
    part: Part = field(default_factory=Part)
    parts: tuple[Part, ...] = ()


def test_a_key_that_a_release_added_is_no_difference_at_its_default(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    begin(folder, Config())
    before = (folder / "config.yaml").read_text()
    runs.create(folder, Later())[1].release()
    assert (folder / "config.yaml").read_text() == before
    with pytest.raises(ConfigError, match=r"\(seed: absent then, 3 now\)"):
        runs.create(folder, Later(seed=3))
    with pytest.raises(
        ConfigError, match=r"\(size: 1 then, 2 now; part: absent then, \{'kind': 'b', 'rate': 0.5\} now\)"
    ):
        runs.create(folder, Later(size=2, part=Part("b")))
    runs.create(folder, Config())[1].release()  # the refusals have given the lease back
    begin(tmp_path / "later", Later(part=Part("b", 1), parts=(Part(), Part("c"))))
    runs.create(tmp_path / "later", Later(part=Part("b", 1.0), parts=(Part(), Part("c"))))[1].release()
    with pytest.raises(ConfigError, match=r"\(parts.1.kind: 'c' then, 'd' now\)"):
        runs.create(tmp_path / "later", Later(part=Part("b", 1), parts=(Part(), Part("d"))))
    with pytest.raises(
        ConfigError, match=r"\(seed: 0 then, absent now; part: .* then, absent now; parts: .* then, absent now\)"
    ):
        runs.create(tmp_path / "later", Config())
    (folder / "config.yaml").write_text("a: [\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        runs.create(folder, Config())


def test_a_folder_that_cannot_be_laid_out_is_given_back(tmp_path: Path) -> None:
    """In a notebook the process that failed is the one that tries again."""
    runs.create(tmp_path, Config())[1].release()
    (tmp_path / "environment.json").unlink()
    (tmp_path / "environment.json").mkdir()
    with pytest.raises(StorageError, match=r"environment\.json"):
        runs.create(tmp_path, Config())
    (tmp_path / "environment.json").rmdir()
    runs.create(tmp_path, Config())[1].release()


def test_second_owner_is_refused_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    first = leases.Lease.acquire(tmp_path)
    with pytest.raises(LeaseError, match=f"in use by process {os.getpid()}"):
        leases.Lease.acquire(tmp_path)
    first.release()
    code = "import os, sys; from pathlib import Path; from terrella.core.lease import Lease; "
    code += "Lease.acquire(Path(sys.argv[1])); print(1, flush=True); os.kill(os.getpid(), 9)"
    killed = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    # it is dead now, and a zombie until we wait for it
    assert killed.stdout is not None and killed.stdout.read() == b"1\n"
    while psutil.Process(killed.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    second = leases.Lease.acquire(tmp_path)
    assert second.incarnation == 3
    second.release()
    killed.wait(timeout=300)


def test_a_lock_that_is_never_given_back_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LOCK_S", 0.3)
    with open(tmp_path / "lease.lock", "w") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        with pytest.raises(DeadlineError, match=r"lease\.lock: another process has kept it locked for 0\.3 s"):
            leases.Lease.acquire(tmp_path)
    leases.Lease.acquire(tmp_path).release()


def test_an_orphan_writes_nothing_after_a_take_over(tmp_path: Path) -> None:
    run, lease = runs.create(tmp_path, Config())
    run.metrics.append("a", 1, {"loss": 1.0})
    holder = read_json(tmp_path / "lease.json")
    write_atomic(tmp_path / "lease.json", json.dumps({**holder, "place": "elsewhere"}))
    newer = leases.Lease.acquire(tmp_path, wait_s=5, timeout_s=0.2)
    for write in (
        lambda: run.metrics.append("a", 2, {"loss": 0.5}),
        lambda: run.finish("a", {}),
        lambda: run.write_result("t", {}),
        lambda: run.write_rollouts("a", 1, []),
    ):
        with pytest.raises(LeaseError, match="no longer owns"):
            write()
    assert len(list(run.metrics.rows())) == 1
    lease.release()
    assert leases.holds(tmp_path, newer.token)
    newer.release()


def test_metrics_are_cut_back_to_a_step(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for stage, step in (("a", 1), ("a", 2), ("b", 1), ("b", 2), ("b", 3), ("c", 1)):
        metrics.append(stage, step, {"loss": step / 3, "time/step_s": 0.1})
    with open(metrics.path, "a") as stream:
        stream.write('{"stage": "c", "st')  # a kill in the middle of a line
    metrics.rewind("b", 2, later=("c",))
    assert [(r["stage"], r["step"]) for r in metrics.rows()] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert all("time/step_s" not in row for row in comparable(metrics.rows()))


def test_a_damaged_metrics_line_is_named(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.path.write_text('{"stage": "a", "step": 1}\n{broken\n{"stage": "a", "step": 2}\n')
    with pytest.raises(StorageError, match=r"metrics\.jsonl:2: not a JSON line"):
        list(metrics.rows())


def test_nan_stays_visible(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append("a", 1, {"loss": float("nan")})
    assert next(metrics.rows())["loss"] == "nan"


def test_unwritable_and_full_disks_are_one_clear_error(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(StorageError, match="not a folder"):
        runs.create(blocker / "run", Config())
    if Path("/dev/full").exists():
        metrics = MetricsFile(Path("/dev/full"))
        with pytest.raises(StorageError, match="disk is full"):
            metrics.append("a", 1, {})
