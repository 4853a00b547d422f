"""Implementations in processes of their own: they wait for the word, and nothing of them is left."""

import signal
import subprocess
import sys
import time

import pytest

from terrella.benchmarks.children import Child
from terrella.tests.reap import is_running


def child(tmp_path, code: str) -> Child:
    made = Child("unused", [], tmp_path / "log")
    made.command = [sys.executable, "-c", code]
    return made


def test_a_child_begins_at_the_word_and_tells_its_figures(tmp_path) -> None:
    one = child(
        tmp_path,
        (
            "import json, sys; print('imported', flush=True); print('RESULT ' + json.dumps({'word': "
            "sys.stdin.readline()}))"
        ),
    )
    one.start()
    time.sleep(0.5)
    one.start()  # a second start changes nothing
    assert "RESULT" not in one.log.read_text()
    result = one.finish(300)
    assert isinstance(result, dict) and result["word"] == "go\n" and result["device_gib"] >= 0


def test_one_that_fails_or_takes_too_long_says_why(tmp_path) -> None:
    broken = child(tmp_path, "import sys; sys.stdin.readline(); raise ValueError('no such thing')")
    broken.start()
    assert "no such thing" in str(broken.finish(300))
    slow = child(tmp_path, "import time; print('half way', flush=True); time.sleep(3600)")
    slow.start()
    limit = time.monotonic() + 300
    while "half way" not in slow.log.read_text():
        assert time.monotonic() < limit
        time.sleep(0.05)
    said = slow.finish(1.0)
    assert isinstance(said, str) and said.startswith("no result within 1 s") and "half way" in said
    assert slow.process is not None and slow.process.poll() is not None


def test_a_child_whose_parent_is_gone_does_not_begin(tmp_path) -> None:
    code = "from terrella.benchmarks.children import wait_for_word; wait_for_word(); print('begun', flush=True)"
    one = child(tmp_path, code)
    one.start()
    assert one.process is not None and one.process.stdin is not None
    one.process.stdin.close()
    assert one.process.wait(300) != 0 and "begun" not in one.log.read_text().splitlines()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_that_has_begun_dies_with_its_parent(tmp_path, number: int) -> None:
    """A benchmark that a time limit ends leaves nothing on the machine."""
    inner = (
        "import time; from terrella.benchmarks.children import wait_for_word; wait_for_word(); print('begun', "
        "flush=True); time.sleep(3600)"
    )
    code = f"""
import sys
from pathlib import Path
from terrella.benchmarks.children import Child
one = Child("unused", [], Path({str(tmp_path / "log")!r}))
one.command = [sys.executable, "-c", {inner!r}]
one.start()
print(one.process.pid, flush=True)
one.finish(3600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, limit = int(parent.stdout.readline()), time.monotonic() + 300
    while "begun" not in (tmp_path / "log").read_text():
        assert time.monotonic() < limit and parent.poll() is None
        time.sleep(0.1)
    parent.send_signal(number)
    parent.wait(300)
    while is_running(pid):
        assert time.monotonic() < limit, "the child outlived its parent"
        time.sleep(0.1)
