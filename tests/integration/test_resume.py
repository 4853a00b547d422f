"""SIGKILL at any moment, then the same command again: every result equals an uninterrupted run's bit for bit."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from terrella.tests.launch import tiny_run
from terrella.tests.sampling import in_turn

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def folder_of_whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole") / "run"


@pytest.fixture(scope="module")
def whole(folder_of_whole: Path) -> tuple[dict, float]:
    begun = time.monotonic()
    done = tiny_run.train(folder_of_whole)
    assert done.returncode == 0, done.stdout + done.stderr
    return tiny_run.results(folder_of_whole), time.monotonic() - begun


def wait_for(path: Path) -> None:
    end = time.monotonic() + tiny_run.PATIENCE_S
    while not path.exists():
        assert time.monotonic() < end, f"no {path.name} after {tiny_run.PATIENCE_S:.0f} s"
        time.sleep(0.05)


def check(whole: tuple[dict, float], folder: Path, seed: int, kills: int) -> None:
    expected, took = whole
    run = tiny_run.kill_often(tiny_run.command, folder, took, random.Random(seed), kills)
    done = tiny_run.train(run)
    assert done.returncode == 0, done.stdout + done.stderr
    got = tiny_run.results(run)
    assert got.keys() == expected.keys()
    for name in expected:
        assert got[name] == expected[name], name


def test_killed_runs_end_like_an_uninterrupted_one(whole: tuple[dict, float], tmp_path: Path) -> None:
    check(whole, tmp_path, seed=1, kills=3)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_killed_runs_many_times(whole: tuple[dict, float], tmp_path: Path, seed: int) -> None:
    check(whole, tmp_path, seed=100 + seed, kills=2)


def test_a_finished_run_says_so_and_another_owner_is_refused(whole: tuple[dict, float], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = subprocess.Popen(tiny_run.command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(folder / "stages" / "selfplay.json")
        second = tiny_run.train(folder)
        assert second.returncode == 4 and "is in use by process" in second.stderr
        assert first.wait(timeout=tiny_run.PATIENCE_S) == 0
    finally:
        first.kill()
    again = tiny_run.train(folder)
    assert again.returncode == 0 and "has finished" in again.stdout
    assert tiny_run.results(folder)["metrics"] == whole[0]["metrics"]


def test_a_request_to_stop_saves_and_the_run_goes_on(whole: tuple[dict, float], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen(tiny_run.command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(folder / "metrics.jsonl")
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=tiny_run.PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 75 and "saved and stopped on request" in error
    done = tiny_run.train(folder)
    assert done.returncode == 0 and tiny_run.results(folder) == whole[0]


@in_turn("more steps")
def test_a_finished_run_goes_on_to_more_steps_as_if_it_had_never_ended(
    whole: tuple[dict, float], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shorter = ("stages.rlvr.steps=2", "stages.rlvr.checkpoints.finished=whole")  # the control arm trains after it
    assert tiny_run.train(folder, *shorter).returncode == 0
    words = [*tiny_run.command(folder, *shorter), "--steps", "rlvr=4"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=tiny_run.PATIENCE_S)
    assert done.returncode == 0 and "going on with rlvr to step 4" in done.stdout, done.stderr
    found = tiny_run.results(folder)
    # a rollout of its former last step remains
    kept = {key: value for key, value in whole[0].items() if not key.endswith(".jsonl")}
    assert {key: found[key] for key in kept} == kept
    assert (folder / "set-aside" / "001" / "results").is_dir()


def test_the_export_loads_in_transformers_and_can_be_evaluated(
    whole: tuple[dict, float], folder_of_whole: Path, tmp_path: Path
) -> None:
    export = folder_of_whole / "export"
    proof = json.loads((export / "export_proof.json").read_text())
    assert proof["max_logit_difference"] <= proof["tolerance"] and proof["tensors"]
    code = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "t = AutoTokenizer.from_pretrained(sys.argv[1]); m = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "ids = t('#_PU', return_tensors='pt').input_ids; assert ids.shape == (1, 4), ids\n"
        "assert m(ids).logits.shape == (1, 4, m.config.vocab_size)\n"
    )
    captured: dict = {"capture_output": True, "text": True, "timeout": tiny_run.PATIENCE_S}
    command = [sys.executable, "-m", "terrella"]
    loaded = subprocess.run([sys.executable, "-c", code, str(export)], **captured)
    assert loaded.returncode == 0, loaded.stderr
    shared = ["SimpleSokoban", "--model", str(export), "--n", "4", "--rooms", "2"]
    scored = subprocess.run([*command, "eval", *shared, "--out", str(tmp_path / "e.json")], **captured)
    assert scored.returncode == 0 and "copy the state" in scored.stdout, scored.stderr
    assert json.loads((tmp_path / "e.json").read_text())["rows"][-1]["cells"][0]["value"] == 1.0
    rolled = subprocess.run([*command, "worlds", "imagine", *shared, "--out", str(tmp_path / "r.jsonl")], **captured)
    assert rolled.returncode == 0 and len((tmp_path / "r.jsonl").read_text().splitlines()) == 4
    other = subprocess.run([*command, "eval", "FrozenLake", *shared[1:]], **captured)
    assert other.returncode == 2 and "no grid dynamics" in other.stderr
