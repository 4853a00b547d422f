"""Files that others wrote and read."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from terrella.core.errors import ConfigError
from terrella.core.files import json_lines, sync_files, whole_folder, write_atomic
from terrella.rl.web_pages.data import load_transitions
from terrella.rl.webrl.release import read_lines, write_lines

ODD = "one\u2028two\u2029three\x85four\x0bfive"  # separators that str.splitlines cuts at and JSON leaves as they are


def test_only_a_line_feed_ends_a_line_of_json() -> None:
    text = f'"{ODD}"\r\n\n"b"\n'
    assert [(n, line.strip()) for n, line in json_lines(text)] == [(1, f'"{ODD}"'), (3, '"b"')]


def test_rows_with_odd_separators_come_back(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    write_lines(path, [{"html": ODD}, {"html": "b"}])
    assert read_lines(path) == [{"html": ODD}, {"html": "b"}]
    row = {**asdict(load_transitions()[0]), "url": ODD}
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert asdict(load_transitions(path)[0]) == row


def test_a_replaced_file_and_its_folder_entry_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut after `write_atomic` must find the new file: both the file and the folder are synced, in this
    order.
    """
    synced = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")) or real(handle)
    )
    write_atomic(tmp_path / "a.json", "{}")
    assert len(synced) == 2 and synced[0].startswith(str(tmp_path / ".a.json.")) and synced[1] == str(tmp_path)


def test_a_folder_is_on_disk_before_it_has_its_name_and_so_is_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda handle: steps.append(os.readlink(f"/proc/self/fd/{handle}")) or sync(handle)
    )
    monkeypatch.setattr(os, "replace", lambda old, new: steps.append(f"{old} -> {new}") or replace(old, new))
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    out.mkdir()
    with whole_folder(out) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "weights").write_bytes(b"x")
    synced = {str(partial / "inner" / "weights"), str(partial / "inner"), str(partial)}
    assert set(steps[:3]) == synced and steps[3:] == [f"{partial} -> {out}", str(tmp_path)]
    with pytest.raises(ConfigError, match="out: is not empty"), whole_folder(out):
        pass
    assert (out / "inner" / "weights").read_bytes() == b"x"


def test_a_folder_that_cannot_be_finished_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "of a killed start").write_bytes(b"")
    with pytest.raises(ZeroDivisionError), whole_folder(tmp_path / "out") as folder:
        assert list(folder.iterdir()) == []
        (folder / "half").write_bytes(b"x")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_two_hosts_with_equal_process_ids_do_not_share_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: names.append(str(old)) or real(old, new))
    for _ in range(2):
        write_atomic(tmp_path / "a.json", "{}")
    assert len(set(names)) == 2


def test_settled_files_follow_the_umask(tmp_path: Path) -> None:
    inner = tmp_path / "folder" / "weights"
    inner.parent.mkdir()
    inner.write_bytes(b"x")
    inner.chmod(0o600)
    sync_files(tmp_path / "folder")
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    assert inner.stat().st_mode == plain.stat().st_mode
