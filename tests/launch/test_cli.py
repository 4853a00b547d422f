"""The command line answers fast, without torch, and says what is wrong in one message."""

import subprocess
import sys
import time

import pytest

from terrella.launch import cli, recipe
from terrella.launch.cli import VERBS


def terrella(*args: str, timeout: float = 60) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "terrella", *args], capture_output=True, text=True, timeout=timeout)


def test_help_lists_the_verbs_without_torch() -> None:
    code = (
        "import sys\nfrom terrella.launch.cli import cli\n"
        "try:\n    cli.main(['--help'], prog_name='terrella')\n"
        "finally:\n    assert not {'torch', 'megatron', 'transformers'} & set(sys.modules), 'a heavy package was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(verb in done.stdout for verb in VERBS)


def test_help_answers_in_under_a_second() -> None:
    times = []
    for _ in range(3):
        begun = time.monotonic()
        assert terrella("--help").returncode == 0
        times.append(time.monotonic() - begun)
    assert min(times) < 1.0


def test_unknown_verb_exits_2_with_the_list() -> None:
    done = terrella("trian")
    assert done.returncode == 2
    assert "unknown verb 'trian'" in done.stderr and "train" in done.stderr


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_verb_answers_help(verb: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([verb, "--help"])
    assert caught.value.code == 0 and "Usage" in capsys.readouterr().out


@pytest.mark.parametrize("name", recipe.shipped())
def test_shipped_recipes_load(name: str) -> None:
    assert recipe.load(name).stages


def test_bad_recipes_exit_2(tmp_path, capsys: pytest.CaptureFixture) -> None:
    bad = tmp_path / "bad.yaml"
    text = (recipe.RECIPES / "sokoban-tiny.yaml").read_text()
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
