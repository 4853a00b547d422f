"""SIGKILL at any moment, then the same command again: every result equals an uninterrupted run's bit for bit."""

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from terrella.tests.launch import tiny_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, float]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    begun = time.monotonic()
    done = tiny_run.train(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return tiny_run.results(folder), time.monotonic() - begun


def kill_once(run: Path, after_s: float) -> bool:
    """Start the run and kill it after so many seconds; False when it had finished before."""
    process = subprocess.Popen(tiny_run.command(run), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(timeout=after_s)
        return False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
        return True


def check(whole: tuple[dict, float], folder: Path, seed: int, kills: int) -> None:
    expected, took = whole
    rng = random.Random(seed)
    killed = sum(kill_once(folder, rng.uniform(0.05, 0.95) * took) for _ in range(kills))
    done = tiny_run.train(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert killed, "every start finished before its kill; the test saw nothing"
    got = tiny_run.results(folder)
    assert got.keys() == expected.keys()
    for name in expected:
        assert got[name] == expected[name], name


def test_killed_runs_end_like_an_uninterrupted_one(whole: tuple[dict, float], tmp_path: Path) -> None:
    check(whole, tmp_path / "run", seed=1, kills=3)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_killed_runs_many_times(whole: tuple[dict, float], tmp_path: Path, seed: int) -> None:
    check(whole, tmp_path / "run", seed=100 + seed, kills=2)


def test_a_finished_run_says_so_and_another_owner_is_refused(whole: tuple[dict, float], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = subprocess.Popen(tiny_run.command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (folder / "stages" / "selfplay.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    second = tiny_run.train(folder)
    assert second.returncode == 4 and "is in use by process" in second.stderr
    assert first.wait(timeout=240) == 0
    again = tiny_run.train(folder)
    assert again.returncode == 0 and "has finished" in again.stdout
    assert tiny_run.results(folder)["metrics"] == whole[0]["metrics"]


def test_a_request_to_stop_saves_and_the_run_goes_on(whole: tuple[dict, float], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen(tiny_run.command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 75 and "saved and stopped on request" in error
    done = tiny_run.train(folder)
    assert done.returncode == 0 and tiny_run.results(folder) == whole[0]
