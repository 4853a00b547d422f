"""`terrella recipes`: every recipe that ships is listed truly; a wrong name gets a right one."""

from pathlib import Path

import pytest

from terrella.core.errors import ConfigError
from terrella.launch import cli, recipe
from terrella.launch.commands.recipes import catalogue
from terrella.launch.recipe_files import chosen, comes_in_several, find, methods, recipes_of, shipped
from terrella.launch.worker import model_of
from terrella.models.geometry import count
from terrella.tests.sampling import few

EARLIER = """
demo grpo mpc-sites-tiny mpc-sites ppo sft sokoban-tiny spa-countdown-1gpu spa-countdown-tiny spa-countdown spa-frozenlake-1gpu
spa-frozenlake-tiny spa-frozenlake spa-qa-1gpu spa-qa-tiny spa-qa spa-sokoban-1gpu spa-sokoban-gpu spa-sokoban-tiny spa-sokoban
spa-sudoku-1gpu spa-sudoku-tiny spa-sudoku spa-webshop-1gpu spa-webshop-tiny spa-webshop text-game-rlvr-binary-1gpu
text-game-rlvr-binary-7b text-game-rlvr-binary text-game-rlvr-task-1gpu text-game-rlvr-task text-game-sft-1gpu text-game-sft-7b
text-game-sft text-game-tiny video-gpu video-rt1-released video-rt1-single-released video-rt1-single video-rt1 video-tiny
web-page-rlvr-1gpu web-page-rlvr web-page-sft-1gpu web-page-sft web-page-tiny webrl-miniwob-tiny webrl-miniwob webrl-sites-1gpu
webrl-sites webrl-tiny webrl-webarena-lite-70b webrl-webarena-lite
"""  # noqa: E501


def run(capsys: pytest.CaptureFixture, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(words))
    told = capsys.readouterr()
    return caught.value.code or 0, told.out, told.err  # type: ignore[return-value]


def test_the_catalogue_holds_every_file_of_every_method() -> None:
    files = {
        method: {p.path.stem if comes_in_several(method) else "" for p in recipes_of(method).values()}
        for method in methods()
    }
    assert {method: set(about["sizes"]) for method, about in catalogue().items()} == files and len(files) <= 18


def test_names_are_those_of_the_runs_and_of_earlier_releases() -> None:
    assert all(recipe.load(name).name == name for name in few(list(shipped()), 12))
    assert set(EARLIER.split()) <= shipped().keys()


@pytest.mark.parametrize(
    ("method", "size", "env", "name"),
    [
        ("demo", None, None, "demo"),
        ("spa", None, None, "spa"),  # which is then looked up as usual
        ("spa", "tiny", "qa", "spa-qa-tiny"),
        ("spa", None, "webshop", "spa-webshop"),
        ("webrl", "tiny", "miniwob", "webrl-miniwob-tiny"),
        ("text-game-rlvr", "7b", None, "text-game-rlvr-binary-7b"),
    ],
)
def test_a_method_is_chosen_by_size_and_environment(method: str, size: str | None, env: str | None, name: str) -> None:
    assert chosen(method, size, env) == name and find(name)
    assert find("spa") == find("spa-sokoban") and find("video") == find("video-gpu")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "spa", "--size", "huge"], "--size huge: the recipe spa has none; there are spa-sokoban-1gpu"),
        (["train", "demo", "--size", "tiny"], "--size tiny: the recipe demo has none"),
        (["check", "webrl", "--env", "mars"], "--env mars: the recipe webrl has none"),
        (["launch", "spa", "--env", "chess", "--dry-run"], "--env chess: the recipe spa has none"),
    ],
)
def test_a_size_or_environment_that_there_is_not(words: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    code, _, error = run(capsys, *words)
    assert code == 2 and message in error


def test_sizes_and_environments_on_the_command_line(capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "train", "spa", "--size", "tiny", "--env", "sudoku", "--dry-run")
    assert code == 0 and "spa-sudoku-tiny" in out
    code, out, _ = run(capsys, "launch", "text-game-rlvr", "--env", "task", "--dry-run")
    assert code == 0 and "text-game-rlvr-task" in out


@pytest.mark.parametrize(
    ("name", "method", "size"),
    [
        ("demo", "demo", ""),
        ("sokoban-tiny", "sokoban", "tiny"),
        ("spa-sokoban", "spa", "paper"),
        ("video-gpu", "video", "gpu"),
        ("webrl-webarena-lite-70b", "webrl", "webarena-lite-70b"),
    ],
)
def test_size_and_hardware_are_those_of_the_recipe(name: str, method: str, size: str) -> None:
    loaded, told = recipe.load(name), catalogue()[method]["sizes"][size]
    model = loaded.model if loaded.env is None or loaded.env.kind != "video" else model_of(loaded)
    unit = {"M": 1e6, "B": 1e9}[told["size"][-1]]
    assert count(model).total / unit == pytest.approx(float(told["size"][:-1]), abs=0.06 if told["size"] < "1" else 0.5)
    assert told["hardware"].split()[0] == str(loaded.ranks)


def test_the_list_fits_80_columns_and_names_what_to_do_next(capsys: pytest.CaptureFixture) -> None:
    code, out, _ = run(capsys, "recipes")
    assert (
        code == 0
        and "demo" in out
        and "--env webarena-lite --size 70b" in out
        and "terrella recipes NAME --copy" in out
    )
    assert max(map(len, out.splitlines())) <= 80


def test_a_copy_runs_as_the_original_and_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "recipes", "spa-sudoku-tiny", "--copy")[0] == 0  # one that is laid over another
    assert recipe.load("spa-sudoku-tiny.yaml") == recipe.load("spa-sudoku-tiny")
    code, _, error = run(capsys, "recipes", "spa-sudoku-tiny", "--copy")
    assert code == 2 and "exists already" in error
    assert run(capsys, "recipes", "--copy")[0] == 2


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'spa-sokoban-tiny'"):
        find("spa-sokban-tiny")
    with pytest.raises(ConfigError, match="`terrella recipes` lists them"):
        find("zzz")


def test_a_file_that_is_no_recipe_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "list.yaml").write_text("[1]\n")
    code, _, error = run(capsys, "recipes", str(tmp_path / "list.yaml"))
    assert code == 2 and "list.yaml: is no recipe" in error
