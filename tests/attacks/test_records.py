"""Records and data of finished stages: a change is named before anything is built on it."""

import json
from pathlib import Path

import pytest

from terrella.tests.attacks.conftest import Victim, start
from terrella.tests.launch import tiny_run


def change(path: Path) -> None:
    """Another digit where a digit was, in a file that stays well formed."""
    text = path.read_text()
    place = max(i for i, letter in enumerate(text) if letter in "12345678")
    path.write_text(text[:place] + str(int(text[place]) + 1) + text[place + 1 :])


def change_a_room(path: Path) -> None:
    rooms = json.loads(path.read_text())
    path.write_text(json.dumps({**rooms, "train": [rooms["train"][1], *rooms["train"][1:]]}))


@pytest.mark.parametrize(
    ("name", "attack"),
    [
        ("stages/pretrain.json", change),
        ("stages/pretrain.json", Path.unlink),
        ("stages/pretrain.sums", change),
        ("stages/selfplay/rooms.json", change_a_room),
        ("stages/selfplay/rooms.json", Path.unlink),
    ],
)
def test_what_others_build_on_is_refused_by_name(victim: Victim, tmp_path: Path, name: str, attack) -> None:
    run = victim.copy(tmp_path / "run")
    attack(run / name)
    end = start(run)
    assert end.code == 3 and str(run / name) in end.said and "--back-to" in end.said, end
    assert start(run, back=Path(name).parts[1].split(".")[0]).code == 0
    assert tiny_run.results(run) == victim.expected


@pytest.mark.parametrize("rows", [slice(1, None), slice(0)])
def test_a_record_that_lost_rows_is_said(victim: Victim, tmp_path: Path, rows: slice) -> None:
    run = victim.copy(tmp_path / "run")
    path = run / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[rows]))
    end = start(run)
    assert end.code == 0 and f"{path}: " in end.said and "rows are lost that stage pretrain wrote" in end.said, end


def test_a_changed_number_of_the_running_stage_is_said(victim: Victim, tmp_path: Path) -> None:
    run = victim.copy(tmp_path / "run")
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    row = next(i for i, line in enumerate(lines) if '"stage": "rlvr", "step": 2' in line)
    path.write_text("".join([*lines[:row], lines[row].replace('"tokens": ', '"tokens": 1'), *lines[row + 1 :]]))
    end = start(run)
    assert end.code == 0 and f"{path}: rows were changed that stage rlvr wrote" in end.said, end


def test_sums_that_are_lost_are_said(victim: Victim, tmp_path: Path) -> None:
    """Without them nobody can tell whether what the stage left was changed."""
    run = victim.copy(tmp_path / "run")
    sums = run / "stages" / "pretrain.sums"
    sums.unlink()
    end = start(run)
    assert end.code == 0 and f"warning: {sums}: missing" in end.said, end
    assert tiny_run.results(run) == victim.expected
