"""docs/own_task.md is run as it is written, with its own tiny model in place of a large one."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from terrella.launch.cli import cli

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "own_task.md").read_text(encoding="utf-8")
LARGE = "PATH/Qwen2.5-0.5B-Instruct"
FILES = dict(re.findall(r'^```\w+ title="([\w.]+)"\n(.*?)^```$', PAGE, re.M | re.S))
SHELL = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S)
    for line in block.replace("\\\n", " ").splitlines()
]
SMALL = shlex.split(SHELL[-1])[shlex.split(SHELL[-1]).index("--steps") :]  # the page's own settings for the tiny model
PATIENCE_S = 900.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tutorial")
    for name, text in FILES.items():
        (place / name).write_text(text.replace(LARGE, "tiny"))
    assert set(FILES) == {"rows.jsonl", "my.py", "guess.py", "train.py", "tiny.py"} and len(SHELL) == 5
    run(place, [sys.executable, "tiny.py"])
    return place


def run(place: Path, words: list[str]) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, cwd=place, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"


def test_every_command_resolves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for line in SHELL:
        words = shlex.split(line.replace(LARGE, "tiny").replace("runs/sft/export", "tiny"))[1:]
        shown = CliRunner().invoke(cli, [*words, "--dry-run"])
        assert shown.exit_code == 0 and "stages:" in shown.output, f"{line}\n{shown.output}"


def test_no_two_commands_share_a_run_folder() -> None:
    """A run that was started with other settings is refused, so that the page could not be followed to its end."""
    folders = []
    for line in SHELL:
        words = shlex.split(line)
        folders.append(words[words.index("--run") + 1] if "--run" in words else f"runs/{words[2]}")
    for call in ast.walk(ast.parse(FILES["train.py"])):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "terrella.train":
            run = next((ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg == "run"), None)
            folders.append(run or f"runs/{ast.literal_eval(call.args[0])}")
    assert len(folders) == 6 and len(set(folders)) == 6, folders


def test_the_environment_plays(folder: Path) -> None:
    scope: dict = {}
    exec(compile(FILES["guess.py"], "guess.py", "exec"), scope)
    episode = scope["Guess"]().play(70)
    assert "Guess" in next(episode) and episode.send("50") == "Higher." and episode.send("80") == "Lower."
    with pytest.raises(StopIteration) as end:
        episode.send("70")
    assert end.value.value == 1.0


@pytest.mark.full
@pytest.mark.timeout(6 * PATIENCE_S)
def test_every_block_runs(folder: Path) -> None:
    for line in SHELL:
        words = shlex.split(line.replace(LARGE, "tiny"))[1:]
        of_rl = [i for i, word in enumerate(SMALL) if word.startswith("stages.rl.") and "sft" in words]
        small = [word for i, word in enumerate(SMALL) if i not in of_rl and i + 1 not in of_rl]
        run(folder, [sys.executable, "-m", "terrella", *words, *(() if line == SHELL[-1] else small)])
    settings = '{"stages.rl.steps": 1, "stages.rl.max_new_tokens": 4, "stages.evaluate.max_new_tokens": 4}'
    script = FILES["train.py"].replace(LARGE, "tiny").replace('{"seed": 1}', settings)
    assert settings in script
    (folder / "train.py").write_text(script)
    run(folder, [sys.executable, "train.py"])
