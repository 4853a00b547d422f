"""Cores that a process was given, and processes that end with another."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from terrella.core.process import CORES_VARIABLE, keep_near, parse_cores


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process to cores")
def test_a_process_that_was_given_one_core_counts_one() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from terrella.core.process import usable_cores\n"
        "from terrella.launch.supervise import Span, _environment\n"
        "run = type('Run', (), {'token': 't'})\n"
        "print(usable_cores(), _environment(run, Span(0, 1, 1, 'here', 1), 0)['OMP_NUM_THREADS'])"
    )
    bare = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, env=bare
    )
    assert told.stdout.split() == ["1", "1"]


def test_lists_of_cores() -> None:
    assert parse_cores("0-3,8\n") == {0, 1, 2, 3, 8} and parse_cores("5") == {5} and parse_cores("\n") == set()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process to cores")
def test_a_rank_is_kept_on_the_cores_near_its_gpu_and_what_it_starts_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CORES_VARIABLE, "")
    monkeypatch.delenv(CORES_VARIABLE)
    before = os.sched_getaffinity(0)
    lists = {1: f"{min(before)}", 2: f"0-{max(before)}", 3: f"{max(before) + 1}"}  # one core, all, none of ours
    for gpu, cores in lists.items():
        (tmp_path / f"0000:0{gpu}:00.0").mkdir()
        (tmp_path / f"0000:0{gpu}:00.0" / "local_cpulist").write_text(f"{cores}\n")
    try:
        for gpu in (0, 2, 3):
            assert "pinned to" not in keep_near(f"0000:0{gpu}:00.0", tmp_path) and os.sched_getaffinity(0) == before
        told = keep_near("0000:01:00.0", tmp_path)
        assert told == f"GPU 0000:01:00.0: pinned to the 1 cores near it, of {len(before)}"
        assert os.sched_getaffinity(0) == {min(before)}
        code = (
            "import os; from terrella.core.process import use_all_cores\n"
            "print(len(os.sched_getaffinity(0))); use_all_cores(); print(len(os.sched_getaffinity(0)))"
        )
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
        assert child.stdout.split() == ["1", str(len(before))]
    finally:
        os.sched_setaffinity(0, before)


def test_a_worker_does_not_outlive_a_parent_that_died_before_it_began() -> None:
    code = "from terrella.core.process import die_with_parent; die_with_parent({}); print('alive')"
    words = [[sys.executable, "-c", code.format(parent)] for parent in (os.getpid(), 1)]
    told = [subprocess.run(command, capture_output=True, text=True, timeout=120) for command in words]
    assert [(run.returncode, run.stdout) for run in told] == [(0, "alive\n"), (1, "")]


@pytest.mark.skipif(sys.platform != "linux", reason="watched through Linux' process descriptors")
def test_grandchildren_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    """A server's engines: the server dies with its parent by the kernel's hand, and cannot end them."""
    server = (
        "import os, subprocess, sys; from pathlib import Path; "
        "from terrella.core.process import die_with_parent, end_group_with; "
        "parent = int(sys.argv[1]); die_with_parent(parent); end_group_with(parent); "
        "engine = subprocess.Popen(['sleep', '300']); Path(sys.argv[2]).write_text(str(engine.pid)); engine.wait()"
    )
    trainer = (
        "import os, subprocess, sys; command = [sys.executable, '-c', sys.argv[1], str(os.getpid()), sys.argv[2]]; "
        "subprocess.Popen(command, start_new_session=True).wait()"
    )
    shown = tmp_path / "engine"
    process = subprocess.Popen([sys.executable, "-c", trainer, server, str(shown)])
    end = time.monotonic() + 60
    while not (shown.exists() and shown.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    engine = int(shown.read_text())
    os.kill(engine, 0)
    process.kill()
    process.wait()
    while time.monotonic() < end:
        try:
            os.kill(engine, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.kill(engine, signal.SIGKILL)
    raise AssertionError("the engine lives on")
