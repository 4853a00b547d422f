"""The command line answers fast, without torch, and says what is wrong in one message."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from terrella.launch import cli, recipe
from terrella.launch.cli import VERBS
from terrella.launch.recipe_files import find, shipped


def terrella(*args: str, timeout: float = 300) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "terrella", *args], capture_output=True, text=True, timeout=timeout)


HEAVY = "{'torch', 'megatron', 'transformers', 'vllm', 'ray', 'triton', 'playwright', 'mujoco'}"


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["train", "sokoban-tiny", "--dry-run"],
        ["launch", "sokoban-tiny", "--dry-run"],
        ["plan", "llama3-8b", "--layout", "2,1"],
        ["bench"],
    ],
    ids=" ".join,
)
def test_what_does_not_train_needs_no_torch_and_little_time(words: list[str]) -> None:
    code = (
        "import sys\nfrom terrella.launch.cli import cli\n"
        f"try:\n    cli.main({words}, prog_name='terrella')\n"
        f"finally:\n    assert not {HEAVY} & set(sys.modules), 'a heavy package was imported'\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    if words == ["--help"]:
        assert all(verb in done.stdout for verb in set(VERBS) - cli.HIDDEN)
    # of the processor, not of the clock: the machine may be busy
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < (1.0 if words == ["--help"] else 2.0)


def test_unknown_verb_exits_2_with_the_list() -> None:
    done = terrella("trian")
    assert done.returncode == 2
    assert "unknown verb 'trian'" in done.stderr and "train" in done.stderr


@pytest.mark.parametrize(("verb", "now"), cli.MOVED.items())
def test_an_old_verb_is_refused_with_its_new_name(verb: str, now: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([verb, "x"])
    assert caught.value.code == 2 and f"'{verb}' is now `terrella {now}`" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        cli.main([*now.split(), "--help"])
    assert caught.value.code == 0


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_verb_answers_help(verb: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([verb, "--help"])
    assert caught.value.code == 0 and "Usage" in capsys.readouterr().out


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipes_load(name: str) -> None:
    assert recipe.load(name).stages


def test_bad_recipes_exit_2(tmp_path, capsys: pytest.CaptureFixture) -> None:
    bad = tmp_path / "bad.yaml"
    text = find("sokoban-tiny").path.read_text()
    bad.write_text(text.replace("prompts_per_step", "prompts_per_stpe"))
    for arguments, message in (
        (["train", str(tmp_path / "missing.yaml")], "no such recipe file"),
        (["train", "no-such-recipe"], "neither a file nor a recipe"),
        (["train", str(bad)], "did you mean 'prompts_per_step'?"),
        (["train", "sokoban-tiny", "--set", "ranks=0"], "ranks: 0 must be above 0"),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        error = capsys.readouterr().err
        assert caught.value.code == 2 and message in error and len(error.strip().splitlines()) == 1, error


def test_dry_run_prints_the_resolved_settings(capsys: pytest.CaptureFixture, tmp_path) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "sokoban-tiny", "--set", "seed=5", "--run", str(tmp_path / "r"), "--dry-run"])
    out = capsys.readouterr().out
    assert caught.value.code == 0 and "seed: 5" in out and "# digest:" in out
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("package", "recipe_name", "more", "line"),
    [
        ("mujoco", "video-tiny", (), "pip install 'terrella[video]'"),
        ("playwright", "webrl-miniwob-tiny", (), "pip install 'terrella[web]'"),
        ("miniwob", "webrl-miniwob-tiny", (), "pip install 'terrella[miniwob]'"),
        (
            "vllm",
            "sokoban-tiny",
            ("--set", "stages.rlvr.rollouts={sampler: {kind: vllm}}"),
            "pip install 'terrella[vllm]'",
        ),
    ],
)
def test_a_missing_extra_is_told_before_anything_starts(
    package, recipe_name, more, line, tmp_path, capsys, monkeypatch
) -> None:
    if package == "playwright":
        pytest.importorskip("miniwob", reason="the recipe asks for miniwob first")
    monkeypatch.setitem(sys.modules, package, None)  # as Python sees a package that is not there
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", recipe_name, "--run", str(tmp_path / "r"), *more])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and line in error and len(error.strip().splitlines()) == 1
    assert not (tmp_path / "r").exists()


def test_a_package_that_is_missed_later_is_told_the_same_way(capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "sokoban-tiny", "--ray"])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and "pip install 'terrella[ray]'" in error and "Traceback" not in error


def test_warnings_of_other_packages_stay_off_the_screen() -> None:
    code = (
        "import sys, warnings\nfrom terrella.launch import cli\nsys.argv = ['terrella', '--version']\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "import megatron.core.optimizer\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "Apex" not in done.stderr and "Warning" not in done.stderr, done.stderr


def begun(folder: Path, **how: Any) -> subprocess.Popen[str]:
    """A run whose worker has begun to import; nothing of it listens yet."""
    words = [sys.executable, "-m", "terrella", "train", "sokoban-tiny", "--run", str(folder), "--set", "ranks=1"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True, **how)
    assert process.stdout is not None and "loading torch" in process.stdout.readline()
    time.sleep(1.0)
    return process


def test_ctrl_c_while_the_workers_start_stops_the_run_without_an_error(tmp_path) -> None:
    process = begun(tmp_path / "r", stderr=subprocess.PIPE)
    try:
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends Ctrl-C to all of them
        _, error = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 75, error
    assert "stopping when the ranks have loaded; nothing was done yet, so nothing is lost" in error
    assert f"{tmp_path / 'r'}: stopped on request before anything was done" in error and "saved" not in error
    assert "error" not in error and "Traceback" not in error


def test_ctrl_c_that_ends_the_reader_too_stops_the_run_as_well(tmp_path) -> None:
    process = begun(tmp_path / "r", stderr=subprocess.STDOUT)
    try:
        assert process.stdout is not None
        process.stdout.close()  # as of `terrella train ... 2>&1 | tee log`
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=300) == 75
    finally:
        process.kill()


def test_a_request_to_stop_is_heard_where_who_started_the_run_had_blocked_it(tmp_path) -> None:
    process = begun(
        tmp_path / "r",
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
    )
    try:
        process.terminate()
        _, error = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 75 and "stopped on request before anything was done" in error, error
