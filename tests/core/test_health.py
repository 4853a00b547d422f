"""Signs of life, and findings that name their fix."""

import json
import threading
import time
from pathlib import Path

import pytest

from terrella.core import health
from terrella.core.health import Check, Heartbeat, dcgm, judge_gpu, kernel_log, stragglers, xids
from terrella.tests.parallel.pool import run_ranks


def test_heartbeat_says_where_the_main_thread_is_and_since_when(tmp_path: Path) -> None:
    owned = threading.Event()
    owned.set()
    beat = Heartbeat(tmp_path / "rank-0.alive.json", owned.is_set, every_s=0.05).start()
    limit = time.monotonic() + 60
    while not (tmp_path / "rank-0.alive.json").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    told = json.loads((tmp_path / "rank-0.alive.json").read_text())
    assert any(place in told["at"] for place in ("test_heartbeat_says", "sleep", "stat"))  # of the loop above
    assert time.time() - told["time"] < 60 and told["since"] <= told["time"]
    beat.stop()
    before = (tmp_path / "rank-0.alive.json").read_bytes()
    owned.clear()  # another owner took the run: this rank must write nothing more
    beat.beat()
    assert (tmp_path / "rank-0.alive.json").read_bytes() == before
    owned.set()
    beat.beat()
    assert (tmp_path / "rank-0.alive.json").read_bytes() != before


def test_gpu_rows_are_judged() -> None:
    healthy = "0, NVIDIA H100 80GB HBM3, 81559, 3, 31, 0, P0"
    assert judge_gpu(healthy).level == "ok"
    assert "reset or replaced" in judge_gpu(healthy.replace("31, 0", "31, 4")).fix
    assert "cooling" in judge_gpu(healthy.replace("31, 0", "90, 0")).fix
    assert "another program" in judge_gpu(healthy.replace("81559, 3,", "81559, 60000,")).fix
    assert judge_gpu(healthy.replace("31, 0", "31, [N/A]")).level == "ok"


def test_slow_ranks_are_named() -> None:
    assert stragglers([1.0, 1.1, 2.0, 1.0]) == [2]
    assert stragglers([0.001, 0.004, 0.001]) == []  # too short to mean anything


def test_a_disk_that_is_nearly_full_is_a_finding(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(health.shutil, "disk_usage", lambda _: type("U", (), {"free": 1e9, "total": 1e12})())
    disk = health.machine(tmp_path / "not" / "yet")[0]
    assert disk.level == "fail" and "--run" in disk.fix and str(tmp_path) in disk.text
    assert Check("warn", "a", "b", "c").line() == "warn  a: b -> c"


def test_arithmetic_is_exact_here() -> None:
    assert health.matmul().level == "ok"


def examine() -> list[str]:
    return [health.pace().text, health.links(1).text]


def test_ranks_measure_each_other() -> None:
    results = run_ranks("terrella.tests.core.test_health:examine", 2)
    assert results[0] == results[1] and "over 2 ranks" in results[0][1]


def test_errors_of_gpus_in_the_kernels_log() -> None:
    line = "[ 412.1] NVRM: Xid (PCI:0000:{}:00): {}, pid='<unknown>', name=<unknown>"
    assert [check.level for check in xids("nothing here\n")] == ["ok"]
    log = "\n".join(line.format(bus, number) for bus, number in (("1b", 31), ("4e", 79), ("4e", 13), ("1b", 43)))
    program, broken = xids(log)
    assert program.level == "warn" and "Xid 31, 43" in program.text and "0000:1b:00" in program.what
    assert broken.level == "fail" and "Xid 79 in" in broken.text and "reset or replaced" in broken.fix


def test_tools_that_a_machine_lacks_are_said_to_be_lacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "was not made" in dcgm().text and "not looked for" in kernel_log()[0].text
    for name, body in (
        ("dcgmi", 'echo "| PCIe - GPU: 3     | Fail   |"; echo "| CUDA  | Pass |"; exit 226'),
        ("dmesg", "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1"),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    assert dcgm().level == "fail" and dcgm().text == "PCIe - GPU: 3 | Fail"
    unserved = "Error: Unable to connect to host engine. Host engine connection invalid/disconnected."
    (tmp_path / "dcgmi").write_text(f"#!/bin/bash\necho '{unserved}'; exit 235\n")
    assert dcgm().level == "warn" and "was not made" in dcgm().text
    assert kernel_log()[0].level == "ok" and "not permitted" in kernel_log()[0].text
