"""The command that makes the LPIPS weight files: what is not the archive is named."""

import tarfile
from pathlib import Path

import pytest

from terrella.launch import lpips


def test_what_is_no_such_archive_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    broken, other = tmp_path / "broken.tar.gz", tmp_path / "other.tar.gz"
    broken.write_bytes(b"x")
    with tarfile.open(other, "w:gz") as tar:
        tar.add(broken, "something-else")
    for archive, told in [
        (tmp_path / "none.tar.gz", "No such file"),
        (broken, "cannot be read"),
        (other, "holds no weights/alexnet.ckpt"),
    ]:
        with pytest.raises(SystemExit, match=told) as failure:
            lpips.main([str(archive), str(tmp_path / "out")])
        assert str(archive) in str(failure.value)
    assert not list(tmp_path.glob("out/*"))
