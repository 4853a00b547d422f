"""Damage is named by shard, sample and field; quarantine sets whole samples aside, counts them, and never trains on
half of one.
"""

import json
import random
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest

from terrella.data.errors import ShardError
from terrella.data.schema import TEXT, TRANSITION
from terrella.data.shards import Reader, ShardSet, ShardWriter, ShuffledOrder
from terrella.data.shards.index import load_index
from terrella.data.shards.verify import statistics, verify


def text_sample(i):
    return {
        "messages.json": [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": "answer"}],
        "meta.json": {"schema": TEXT, "reward": 1.0},
        "tokens.npy": np.arange(20 + i, dtype=np.int32),
        "roles.npy": np.zeros(20 + i, dtype=np.int8),
    }


@pytest.fixture
def folder(tmp_path):
    with ShardWriter(tmp_path / "d", kind=TEXT, max_samples=5) as writer:
        for i in range(12):
            writer.write(text_sample(i))
    return tmp_path / "d"


def flip(folder, shard, sample, field):
    """Change one byte in the middle of a member."""
    path = folder / shard
    index = load_index(str(path))
    at = index.keys.index(sample)
    for m in range(int(index.first_S1[at]), int(index.first_S1[at + 1])):
        if index.fields[int(index.field_M[m])] == field:
            where = int(index.offset_M[m]) + int(index.size_M[m]) // 2
            data = bytearray(path.read_bytes())
            data[where] ^= 1
            path.write_bytes(data)
            return
    raise AssertionError("no such member")


def keys(folder):
    shards = ShardSet(folder)
    return sorted(s["__key__"] for s in Reader(shards, ShuffledOrder(shards.counts), epochs=1))


def test_sound_shards_verify(folder):
    found = verify(folder)
    assert (found.shards, found.samples, found.problems) == (3, 12, [])
    told = statistics(folder)
    assert told["samples"] == 12 and told["fields"]["messages.json"]["count"] == 12 and told["kinds"] == {TEXT: 12}


def test_bad_checksum(folder):
    flip(folder, "shard-000001.tar", "000000007", "tokens.npy")
    with pytest.raises(ShardError, match=r"shard-000001\.tar: sample 000000007: field tokens\.npy: checksum differs"):
        keys(folder)
    (problem,) = verify(folder).problems
    assert (problem.shard, problem.sample, problem.field) == ("shard-000001.tar", "000000007", "tokens.npy")
    before = ShardSet(folder).fingerprint
    assert len(verify(folder, quarantine=True).bad_samples) == 1
    shards = ShardSet(folder)
    assert shards.quarantined == 1 and len(shards) == 11 and shards.fingerprint != before
    assert keys(folder) == [f"{i:09d}" for i in range(12) if i != 7]
    again = verify(folder, quarantine=True)
    assert again.problems == [] and again.already_aside == 1
    assert len(json.loads((folder / "quarantine.json").read_text())["samples"]) == 1


def test_truncated_tar(folder):
    path = folder / "shard-000000.tar"
    index = load_index(str(path))
    third = int(index.offset_M[int(index.first_S1[3]) + 1])  # inside the second member of sample 3
    path.write_bytes(path.read_bytes()[: third + 3])
    with pytest.raises(
        ShardError,
        match=r"shard-000000\.tar: sample 000000003: field meta\.json: the tar has \d+ bytes, its index says \d+",
    ):
        keys(folder)
    assert {p.sample for p in verify(folder, quarantine=True).problems} == {"000000003", "000000004"}
    assert keys(folder) == [f"{i:09d}" for i in range(12) if i not in (3, 4)]


def test_truncated_tar_without_index(folder):
    path = folder / "shard-000000.tar"
    path.with_suffix(".index").unlink()
    assert len(keys(folder)) == 12
    path.write_bytes(path.read_bytes()[:4000])
    with pytest.raises(ShardError, match=r"shard-000000\.tar"):
        keys(folder)
    (problem,) = verify(folder, quarantine=True).problems
    assert problem.sample is None and not (folder / "quarantine.json").exists()


def rewrite(folder, change):
    """The first shard again by tarfile, changed, without an index that would tell."""
    path = folder / "shard-000000.tar"
    with tarfile.open(path) as archive:
        members = [(m.name, archive.extractfile(m).read()) for m in archive]
    path.unlink()
    with ShardWriter(folder, prefix="new", kind=None) as writer:
        samples: dict[str, dict[str, bytes]] = {}
        for name, data in change(members):
            key, _, field = name.partition(".")
            samples.setdefault(key, {})[field] = data
        for key, sample in samples.items():
            writer.write(sample, key=key)


def test_missing_member(folder):
    rewrite(folder, lambda members: [m for m in members if m[0] != "000000002.meta.json"])
    (folder / "shard-000000.index").unlink()
    mend_kind(folder / "new-000000.tar")
    with pytest.raises(ShardError, match=r"new-000000\.tar: sample 000000002: field meta\.json: missing"):
        keys(folder)
    (problem,) = verify(folder, quarantine=True).problems
    assert (problem.sample, problem.field) == ("000000002", "meta.json")
    assert len(keys(folder)) == 11


def mend_kind(path):
    """Say in the index which kind the shard claims to hold."""
    from dataclasses import replace

    from terrella.data.shards.index import index_path

    changed = replace(load_index(str(path)), kind=TEXT).to_bytes()  # the index is mapped: read before it is cut
    Path(index_path(str(path))).write_bytes(changed)


def test_wrong_schema_version(folder):
    rewrite(folder, lambda members: [(n, d.replace(b"text_trajectory/1", b"text_trajectory/9")) for n, d in members])
    (folder / "shard-000000.index").unlink()
    mend_kind(folder / "new-000000.tar")
    problems = verify(folder).problems
    assert len(problems) == 5
    assert str(problems[0]) == (
        "new-000000.tar: sample 000000000: field meta.json: schema: expected 'text_trajectory/1', found "
        "'text_trajectory/9'"
    )


def test_unknown_kind_and_index_version(folder):
    index = folder / "shard-000000.index"
    raw = index.read_bytes()
    sealed = raw.replace(b'"kind":"text_trajectory/1"', b'"kind":"text_trajectory/7"')
    index.write_bytes(re.sub(rb',"head_xxh3":"\w+"', b"", sealed, count=1))  # as a later release may have written it
    with pytest.raises(ShardError, match=r"shard-000000\.tar: holds text_trajectory/7 samples; this release reads"):
        keys(folder)
    index.write_bytes(raw.replace(b'"terrella_index":1', b'"terrella_index":4'))
    with pytest.raises(ShardError, match=r"shard-000000\.index: index version 4, this release reads 1"):
        keys(folder)
    index.write_bytes(raw[:-9] + b"x" + raw[-8:])
    with pytest.raises(ShardError, match=r"shard-000000\.index: the index is damaged"):
        keys(folder)


def test_duplicate_keys(folder, tmp_path):
    with ShardWriter(folder, prefix="zz", kind=TEXT) as writer:
        writer.write(text_sample(0), key="000000004")
    (problem,) = verify(folder, quarantine=True).problems
    assert str(problem) == "zz-000000.tar: sample 000000004: the key occurs twice, also in shard-000000.tar"
    assert len(keys(folder)) == 12
    with tarfile.open(tmp_path / "dup.tar", "w") as archive:
        for name in ("a.txt", "b.txt", "a.json"):
            archive.addfile(tarfile.TarInfo(name))
    with pytest.raises(ShardError, match=r"dup\.tar: sample a: the key occurs twice"):
        ShardSet(tmp_path / "dup.tar")
    with tarfile.open(tmp_path / "dup2.tar", "w") as archive:
        for name in ("a.txt", "a.txt"):
            archive.addfile(tarfile.TarInfo(name))
    with pytest.raises(ShardError, match=r"sample a: field txt: the field occurs twice"):
        ShardSet(tmp_path / "dup2.tar")


def test_a_changed_header_is_found(folder):
    path = folder / "shard-000002.tar"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    (problem,) = verify(folder).problems
    assert problem.shard == "shard-000002.tar" and "header" in problem.reason


def test_a_pickle_is_never_opened(tmp_path):
    import io
    import pickle

    with tarfile.open(tmp_path / "p.tar", "w") as archive:
        for name, body in (("a.x.npy", npy_of_objects()), ("b.y.pyd", pickle.dumps({1: 2}))):
            info = tarfile.TarInfo(name)
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    shards = ShardSet(tmp_path / "p.tar")
    with pytest.raises(ShardError, match=r"sample a: field x\.npy: cannot be decoded: the array is pickled; refused"):
        shards[0]
    assert isinstance(shards[1]["y.pyd"], bytes)


def npy_of_objects():
    import io

    stream = io.BytesIO()
    np.save(stream, np.array([{}], dtype=object), allow_pickle=True)
    return stream.getvalue()


def test_schema_of_transition_checks_types(tmp_path):
    writer = ShardWriter(tmp_path, kind=TRANSITION)
    with pytest.raises(ShardError, match=r"done: expected boolean, found int"):
        writer.write({"transition.json": {"schema": TRANSITION, "state": 1, "action": 1, "next_state": 1, "done": 1}})
    with pytest.raises(ShardError, match=r"field roles\.npy: 2 roles for 3 tokens"):
        good = {"schema": TRANSITION, "state": 1, "action": 1, "next_state": 1}
        writer.write({"transition.json": good, "tokens.npy": np.zeros(3, np.int32), "roles.npy": np.zeros(2, np.int8)})


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_shard_that_is_gone_is_missed(folder, which):
    name = f"shard-{which:06d}"
    (folder / f"{name}.tar").unlink()
    (folder / f"{name}.index").unlink()
    with pytest.raises(ShardError, match=rf"{name}\.tar: dataset\.json lists it, and it is not here"):
        ShardSet(folder)
    (problem,) = verify(folder).problems
    assert (problem.shard, problem.sample) == (f"{name}.tar", None)
    (folder / "dataset.json").unlink()  # the folder as it is, on the user's word
    assert len(ShardSet(folder)) == 12 - len(range(5 * which, min(5 * which + 5, 12)))


def test_a_lost_index_is_made_again_with_its_checksums(folder):
    before = ShardSet(folder).fingerprint
    (folder / "shard-000001.index").unlink()
    again = ShardSet(folder)
    assert (
        again.fingerprint == before
        and again.shard(1).check
        and again.shard(1).index.kind == TEXT
        and verify(folder).problems == []
    )
    path = folder / "shard-000001.tar"
    held = bytearray(path.read_bytes())
    held[700] ^= 1
    path.write_bytes(held)
    with pytest.raises(
        ShardError, match=r"shard-000001\.tar: its index is missing, and the tar is not the one of dataset\.json"
    ):
        keys(folder)
    assert [p.shard for p in verify(folder).problems] == ["shard-000001.tar"]
    (folder / "dataset.json").unlink()  # now nothing can say whether it is whole
    with pytest.raises(ShardError, match="no index though its neighbours have"):
        keys(folder)


def test_every_changed_byte_of_index_or_card_is_named(folder):
    draw = random.Random(7)
    for name in ("shard-000002.index", "dataset.json"):
        held = (folder / name).read_bytes()
        for _ in range(60):
            changed = bytearray(held)
            changed[draw.randrange(len(held))] ^= 1 << draw.randrange(8)
            (folder / name).write_bytes(changed)
            with pytest.raises(ShardError, match=name.partition(".")[0]):
                keys(folder)
        for size in (0, 1, len(held) // 2, len(held) - 2):
            (folder / name).write_bytes(held[:size])
            with pytest.raises(ShardError, match=name.partition(".")[0]):
                keys(folder)
        (folder / name).write_bytes(held)
    held = (folder / "shard-000002.index").read_bytes()
    head, body = json.loads(held.split(b"\n", 1)[0]), held.split(b"\n", 1)[1]
    for key in head:  # a first line that lost a key, and has no seal that would tell
        less = {name: value for name, value in head.items() if name not in (key, "head_xxh3")}
        if key != "head_xxh3":  # the first releases wrote none
            (folder / "shard-000002.index").write_bytes(json.dumps(less).encode() + b"\n" + body)
            with pytest.raises(ShardError, match="shard-000002"):
                keys(folder)
    (folder / "shard-000002.index").write_bytes(held)
    for broken in (b"[]", b'{"samples": 3}', b"\xff", b'{"samples": [{}]}'):
        (folder / "quarantine.json").write_bytes(broken)
        with pytest.raises(ShardError, match=r"quarantine\.json"):
            keys(folder)
