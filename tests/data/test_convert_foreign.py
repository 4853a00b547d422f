"""Shards that the webdataset library wrote become ours: same members, same keys; what is not whole is refused."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds

from terrella.core.errors import ConfigError
from terrella.data.convert import convert
from terrella.data.errors import ShardError
from terrella.data.schema import TEXT
from terrella.data.shards import ShardSet
from terrella.data.shards.verify import verify
from terrella.tests.data.test_shards_damage import text_sample

COUNT = 30


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Three shards of ten samples, the second packed."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    with wds.ShardWriter(str(folder / "part-%06d.tar"), maxcount=10, verbose=0) as sink:
        for i in range(COUNT):
            sink.write({"__key__": f"dir/s{i:03d}", "x.npy": np.full(3, i), "meta.json": {"n": i}, "cls": i})
    plain = folder / "part-000001.tar"
    (folder / "part-000001.tar.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize(
    "source",
    [
        "{0}",
        "{0}/part-{{000000..000000}}.tar::{0}/part-000001.tar.gz::{0}/part-000002.tar",
        "pipe:cat {0}/part-000000.tar::pipe:gzip -dc {0}/part-000001.tar.gz::pipe:cat {0}/part-{{000002..000002}}.tar",
    ],
    ids=["folder", "braces", "commands"],
)
def test_their_pipelines_become_our_shards(theirs: Path, tmp_path: Path, source: str) -> None:
    report = convert("webdataset", source.format(theirs), tmp_path / "ours", max_bytes=20_000)
    assert (report.read, report.written, report.dropped) == (COUNT, COUNT, {})
    shards = ShardSet(tmp_path / "ours")
    assert len(shards.paths) > 1 and verify(tmp_path / "ours").problems == []
    for i in range(COUNT):
        sample = shards[i]
        assert sample["__key__"] == f"dir/s{i:03d}" and sample["x.npy"].tolist() == [i] * 3
        assert sample["meta.json"] == {"n": i} and sample["cls"] == b"%d" % i


@pytest.mark.parametrize("stop", [4, 17])
def test_a_killed_conversion_resumes_to_the_same_bytes(theirs: Path, tmp_path: Path, stop: int) -> None:
    def kill(done: float, report: object) -> None:
        if report.read == stop:
            raise KeyboardInterrupt

    convert("webdataset", str(theirs), tmp_path / "whole", max_bytes=8_000)
    with pytest.raises(KeyboardInterrupt):
        convert("webdataset", str(theirs), tmp_path / "torn", max_bytes=8_000, tell=kill)
    convert("webdataset", str(theirs), tmp_path / "torn", max_bytes=8_000, resume=True)
    assert contents(tmp_path / "whole") == contents(tmp_path / "torn")


def test_samples_of_a_kind_are_checked_and_kept_as_they_are(tmp_path: Path) -> None:
    with wds.ShardWriter(str(tmp_path / "t-%06d.tar"), verbose=0) as sink:
        for i in range(6):
            sample = {**text_sample(i), "messages.json": b'[ {"role": "user", "content": "q"} ]'}
            if i == 2:
                sample["meta.json"] = b"{"
            sink.write({"__key__": f"k{i}", **sample})
    report = convert("webdataset", str(tmp_path / "t-000000.tar"), tmp_path / "ours", kind=TEXT)
    assert report.written == 5 and report.dropped == {"does not fit the schema": 1}
    assert "k2" in report.examples["does not fit the schema"][0]
    raw = ShardSet(tmp_path / "ours", decode=False)
    assert raw.kind(0) == TEXT and raw[0]["messages.json"] == b'[ {"role": "user", "content": "q"} ]'
    with pytest.raises(ConfigError, match="-o kind=nonsense: expected one of"):
        convert("webdataset", str(tmp_path / "t-000000.tar"), None, kind="nonsense")


def test_repeated_keys_are_refused_or_numbered(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with wds.TarWriter(str(tmp_path / f"{name}.tar")) as sink:
            sink.write({"__key__": "same", "n.json": {"from": name}})
    source = f"{tmp_path}/{{a,b}}.tar"
    with pytest.raises(ShardError, match="sample same: the key was already written"):
        convert("webdataset", source, tmp_path / "refused")
    convert("webdataset", source, tmp_path / "ours", keys="numbers")
    assert [(s["__key__"], s["n.json"]["from"]) for s in map(ShardSet(tmp_path / "ours").__getitem__, range(2))] == [
        ("000000-000000000", "a"),
        ("000001-000000000", "b"),
    ]


def test_what_is_not_whole_is_refused_by_its_shard(theirs: Path, tmp_path: Path) -> None:
    plain, packed = theirs / "part-000000.tar", theirs / "part-000001.tar.gz"
    held = plain.read_bytes()
    end = len(held.rstrip(b"\0")) // 512 * 512 + 512  # of the last member: the library takes this for a whole shard
    for size in (end, end - 100, 700):
        plain.write_bytes(held[:size])
        with pytest.raises(ShardError, match=r"part-000000\.tar: "):
            convert("webdataset", str(plain), None)
    plain.write_bytes(held)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(ShardError, match=r"part-000001\.tar\.gz: cannot be read: Compressed file ended"):
        convert("webdataset", str(theirs), None)
    with pytest.raises(ConfigError, match=r"part-000001\.tar: not there \(1 of 3 shards are missing\)"):
        convert("webdataset", f"{theirs}/part-{{000000..000002}}.tar", None)
    with pytest.raises(ShardError, match="pipe:exit 3: cannot be read"):
        convert("webdataset", "pipe:exit 3", None)
    with pytest.raises(ConfigError, match=r"no \.tar, \.tar\.gz, .* file here"):
        convert("webdataset", str(tmp_path), None)
