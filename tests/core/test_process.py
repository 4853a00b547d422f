"""Cores: those that this process was given, not those that the machine has."""

import os
import subprocess
import sys

import pytest


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


def test_a_worker_does_not_outlive_a_parent_that_died_before_it_began() -> None:
    code = "from terrella.core.process import die_with_parent; die_with_parent({}); print('alive')"
    words = [[sys.executable, "-c", code.format(parent)] for parent in (os.getpid(), 1)]
    told = [subprocess.run(command, capture_output=True, text=True, timeout=120) for command in words]
    assert [(run.returncode, run.stdout) for run in told] == [(0, "alive\n"), (1, "")]
