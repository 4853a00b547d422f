"""Folders that are not the run's: nothing of somebody else's is deleted, nor written among."""

from pathlib import Path

import pytest

from terrella.tests.attacks.conftest import Victim, start


@pytest.mark.parametrize("files", [["thesis.tex"], ["src/main.py", "logs/old.log"], ["config.yaml"]])
def test_a_folder_with_other_files_is_refused_by_name_and_left_alone(tmp_path: Path, files: list[str]) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("mine: 1")
    before = sorted(tmp_path.rglob("*"))
    end = start(tmp_path)
    assert (
        end.code == 2
        and str(tmp_path) in end.said
        and files[0].split("/")[0] in end.said
        and "choose another --run" in end.said
    ), end
    assert sorted(tmp_path.rglob("*")) == before


def test_what_lies_where_the_export_goes_is_moved_aside(victim: Victim, tmp_path: Path) -> None:
    run = victim.copy(tmp_path / "run")
    (run / "export").mkdir()
    (run / "export" / "thesis.tex").write_text("mine")
    end = start(run)
    assert end.code == 0 and str(run / "set-aside" / "001") in end.said, end
    assert (run / "set-aside" / "001" / "export" / "thesis.tex").read_text() == "mine"
    assert (run / "export" / "model.safetensors").exists() and not (run / "export" / "thesis.tex").exists()
