"""`terrella recipes`: every recipe that ships is listed truly; a wrong name gets a right one."""

from pathlib import Path

import pytest

from terrella.core.errors import ConfigError
from terrella.launch import cli, recipe
from terrella.launch.recipe import with_vocab
from terrella.launch.recipes_command import catalogue
from terrella.models.geometry import count


def run(capsys: pytest.CaptureFixture, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(words))
    told = capsys.readouterr()
    return caught.value.code or 0, told.out, told.err  # type: ignore[return-value]


def test_the_catalogue_holds_every_recipe_that_ships() -> None:
    assert sorted(catalogue()) == recipe.shipped()


@pytest.mark.parametrize("name", ["demo", "sokoban-tiny", "spa-sokoban", "video-gpu", "webrl-webarena-lite-70b"])
def test_size_and_hardware_are_those_of_the_recipe(name: str) -> None:
    loaded, told = recipe.load(name), catalogue()[name]
    model = with_vocab(loaded, loaded.video.layout.vocab) if loaded.video else loaded.model
    unit = {"M": 1e6, "B": 1e9}[told["size"][-1]]
    assert count(model).total / unit == pytest.approx(float(told["size"][:-1]), abs=0.06 if told["size"] < "1" else 0.5)
    assert told["hardware"].split()[0] == str(loaded.ranks)


def test_the_list_fits_80_columns_and_names_what_to_do_next(capsys: pytest.CaptureFixture) -> None:
    code, out, _ = run(capsys, "recipes")
    assert code == 0 and "demo" in out and "terrella recipes --all" in out
    code, everything, _ = run(capsys, "recipes", "--all")
    assert code == 0 and len(everything) > len(out) and "webrl-webarena-lite-70b" in everything
    assert max(map(len, everything.splitlines())) <= 80


def test_a_copy_runs_as_the_original_and_overwrites_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "recipes", "spa-sudoku-tiny", "--copy")[0] == 0  # one that is laid over another
    assert recipe.load("spa-sudoku-tiny.yaml") == recipe.load("spa-sudoku-tiny")
    code, _, error = run(capsys, "recipes", "spa-sudoku-tiny", "--copy")
    assert code == 2 and "exists already" in error
    assert run(capsys, "recipes", "--copy")[0] == 2


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'spa-sokoban-tiny'"):
        recipe.find("spa-sokban-tiny")
    with pytest.raises(ConfigError, match="`terrella recipes` lists them"):
        recipe.find("zzz")
