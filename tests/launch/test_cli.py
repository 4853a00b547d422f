"""The command line answers fast, without torch, and says what is wrong in one message."""

import resource
import subprocess
import sys

import pytest

from terrella.launch import cli, recipe
from terrella.launch.cli import VERBS


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
        assert all(verb in done.stdout for verb in VERBS)
    # of the processor, not of the clock: the machine may be busy
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < (1.0 if words == ["--help"] else 2.0)


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
