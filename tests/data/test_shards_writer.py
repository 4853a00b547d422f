"""Shards are whole or absent, resume at the exact sample, are the same bytes every time, and other tools read them."""

import ast
import errno
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import webdataset as wds
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext

from terrella.core.errors import ConfigError, DeadlineError, StorageError
from terrella.data.errors import ShardError
from terrella.data.schema import TRANSITION
from terrella.data.shards import Reader, ShardSet, ShardWriter, ShuffledOrder
from terrella.data.shards import writer as writer_module
from terrella.data.shards.card import write_card
from terrella.data.shards.index import load_index
from terrella.data.shards.tar import split_name, tar_header
from terrella.data.shards.writer import ordered_map


def transition(i: int) -> dict:
    return {"transition.json": {"schema": TRANSITION, "state": f"s{i}", "action": i % 4, "next_state": f"s{i + 1}"}}


def write(folder, count, start=0, **options):
    with ShardWriter(folder, kind=TRANSITION, **options) as writer:
        for i in range(start, count):
            writer.write(transition(i), cursor={"line": i + 1})
    return writer


def contents(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def test_same_samples_same_bytes(tmp_path):
    write(tmp_path / "a", 50, max_samples=20)
    time.sleep(1.1)  # a modification time would show
    write(tmp_path / "b", 50, max_samples=20)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert [load_index(str(p)).cursor for p in sorted((tmp_path / "a").glob("*.tar"))] == [
        {"line": n} for n in (20, 40, 50)
    ]


def test_shards_are_bounded(tmp_path):
    with ShardWriter(tmp_path, max_bytes=20_000) as writer:
        for _ in range(40):
            writer.write({"x.npy": np.zeros(300, np.float32)})
    sizes = [p.stat().st_size for p in tmp_path.glob("*.tar")]
    assert len(sizes) > 3 and max(sizes) <= 20_000
    assert len(ShardSet(tmp_path)) == 40


@given(st.integers(0, 45))
@settings(max_examples=12, deadline=None)
def test_an_interrupted_writer_resumes_to_the_same_bytes(stop):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as scratch:
        whole, torn = Path(scratch) / "whole", Path(scratch) / "torn"
        write(whole, 45, max_samples=10)
        writer = ShardWriter(torn, kind=TRANSITION, max_samples=10)
        for i in range(stop):
            writer.write(transition(i), cursor={"line": i + 1})
        if writer._open is not None:
            writer._open.stream.flush()
        del writer  # neither closed nor aborted, as after a kill
        resumed = ShardWriter(torn, kind=TRANSITION, max_samples=10, resume=True)
        assert resumed.samples == max(0, (stop - 1) // 10) * 10
        assert resumed.cursor == ({"line": resumed.samples} if resumed.samples else None)
        with resumed:
            for i in range(resumed.samples, 45):
                resumed.write(transition(i), cursor={"line": i + 1})
        assert contents(whole) == contents(torn)


KILLED = """
import sys
from terrella.data.shards import ShardWriter
writer = ShardWriter(sys.argv[1], max_samples=40)
i = 0
while True:
    writer.write({"n.json": i, "pad.txt": "x" * 2000}, cursor=i)
    i += 1
    if i == 200:
        print("going", flush=True)
"""


def test_a_killed_writer_leaves_whole_shards(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "d")],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout.readline() == b"going\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=300)
    process.stdout.close()
    resumed = ShardWriter(tmp_path / "d", max_samples=40, resume=True)
    assert resumed.samples >= 160 and resumed.samples % 40 == 0 and resumed.cursor == resumed.samples - 1
    assert not [n for n in os.listdir(tmp_path / "d") if n.endswith(".tmp")]
    with resumed:
        for i in range(resumed.samples, resumed.samples + 10):
            resumed.write({"n.json": i, "pad.txt": ""})
    assert [
        s["n.json"]
        for s in Reader(
            ShardSet(tmp_path / "d"), ShuffledOrder(ShardSet(tmp_path / "d").counts, shuffle=False), epochs=1
        )
    ] == list(range(resumed.samples))


def test_writer_refuses(tmp_path):
    write(tmp_path / "d", 3)
    with pytest.raises(ConfigError, match=r"already holds shard-000000\.tar; resume"):
        ShardWriter(tmp_path / "d")
    with pytest.raises(ShardError, match=r"holds transition/1 samples, this writer makes None"):
        ShardWriter(tmp_path / "d", resume=True)
    with pytest.raises(ConfigError, match="unknown kind 'nonsense'"):
        ShardWriter(tmp_path / "e", kind="nonsense")
    writer = ShardWriter(tmp_path / "f", kind=TRANSITION)
    writer.write(transition(0), key="a")
    with pytest.raises(ShardError, match=r"shard-000000\.tar: sample a: the key was already written"):
        writer.write(transition(0), key="a")
    with pytest.raises(ShardError, match=r"sample b: field transition\.json: \(top\): 'action' is missing"):
        writer.write({"transition.json": {"schema": TRANSITION, "state": 1, "next_state": 2}}, key="b")
    with pytest.raises(
        ShardError, match=r"field transition\.json: schema: expected 'transition/1', found 'transition/2'"
    ):
        writer.write({"transition.json": {"schema": "transition/2", "state": 1, "action": 1, "next_state": 2}}, key="b")
    with pytest.raises(ShardError, match=r"field other\.json: unknown in transition/1"):
        writer.write({**transition(1), "other.json": 1}, key="b")
    with pytest.raises(ValueError, match="no dot"):
        writer.write(transition(1), key="a.b")
    with pytest.raises(ValueError, match="pickled"):
        ShardWriter(tmp_path / "g").write({"x.npy": np.array([{}], dtype=object)})
    with pytest.raises(ValueError, match="no encoder"):
        ShardWriter(tmp_path / "h").write({"x.pt": [1]})


def test_an_exception_leaves_no_half_shard(tmp_path):
    with pytest.raises(RuntimeError), ShardWriter(tmp_path, max_samples=2) as writer:
        for i in range(5):
            writer.write({"n.json": i})
        raise RuntimeError
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "shard-000000.index",
        "shard-000000.tar",
        "shard-000001.index",
        "shard-000001.tar",
    ]


def test_parallel_encoding_keeps_the_order(tmp_path):
    from terrella.tests.data import helpers

    for workers in (0, 2):
        with ShardWriter(tmp_path / str(workers), max_samples=30) as writer:
            for i, members in enumerate(ordered_map(helpers.square, range(100), workers)):
                writer.write_encoded(members, key=f"{i:04d}")
    assert contents(tmp_path / "0") == contents(tmp_path / "2")


def test_writers_with_different_prefixes_share_a_folder(tmp_path):
    a, b = ShardWriter(tmp_path, prefix="part0"), ShardWriter(tmp_path, prefix="part1")
    a.write({"n.json": 0})
    b.write({"n.json": 1})
    a.close()
    b.close()
    card = json.loads((tmp_path / "dataset.json").read_text())
    assert [s["name"] for s in card["shards"]] == ["part0-000000.tar", "part1-000000.tar"] and card["samples"] == 2
    assert {s["n.json"] for s in Reader(ShardSet(tmp_path), epochs=1)} == {0, 1}


def test_a_full_disk_is_told_and_whole_shards_are_kept(tmp_path, monkeypatch):
    writer = ShardWriter(tmp_path, max_samples=2)
    for i in range(3):
        writer.write({"n.json": i})

    def full(data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer._open, "_put", full)
    with pytest.raises(StorageError, match="No space left on device; whole shards are kept: make room, then resume"):
        writer.write({"n.json": 3})
    assert ShardWriter(tmp_path, resume=True).samples == 2


def test_a_disk_that_is_full_while_bytes_are_buffered_is_told_and_made_room_on(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, limits[1]))
    try:
        with (
            pytest.raises(StorageError, match="File too large; whole"),
            ShardWriter(tmp_path) as writer,
        ):
            for _ in range(100):
                writer.write({"a.bin": bytes(200_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_takes_no_file_is_told(tmp_path):
    (tmp_path / ".shard-000000.tar.tmp").mkdir()
    writer = ShardWriter(tmp_path)
    with pytest.raises(StorageError, match="Is a directory; whole shards are kept"):
        writer.write({"n.json": 1})


def test_fsspec_urls(tmp_path):
    pytest.importorskip("fsspec")
    url = f"memory://terrella-{os.getpid()}/shards"
    write(url, 25, max_samples=10)
    write(tmp_path / "local", 25, max_samples=10)
    shards = ShardSet(url)
    assert len(shards) == 25 and shards.fingerprint == ShardSet(tmp_path / "local").fingerprint
    assert sorted(s["transition.json"]["state"] for s in Reader(shards, epochs=1)) == sorted(f"s{i}" for i in range(25))
    assert ShardWriter(url, kind=TRANSITION, resume=True).samples == 25


@given(st.text(alphabet="abc/._-", min_size=1, max_size=20))
def test_names_divide_as_webdataset_divides_them(name):
    stem = name.rpartition("/")[2].partition(".")[0]
    key, field = base_plus_ext(name)
    if key is None or not stem or stem.startswith("__"):
        assert split_name(name) is None
    else:
        assert split_name(name) == (key, field.lower())


@pytest.mark.parametrize("style", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_tar_may_end_with_a_folder(tmp_path, style):
    with tarfile.open(tmp_path / "a.tar", "w", format=style) as archive:
        plain, folder = tarfile.TarInfo("a.json"), tarfile.TarInfo("below")
        plain.size, folder.type = 2, tarfile.DIRTYPE
        archive.addfile(plain, io.BytesIO(b"{}"))
        archive.addfile(folder)
    assert ShardSet(tmp_path / "a.tar")[0] == {"__key__": "a", "json": {}}
    (tmp_path / "a.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:1536])
    with pytest.raises(ShardError, match="the end-of-archive mark is missing; last whole member: a"):
        ShardSet(tmp_path / "a.tar")


def test_tarfile_reads_our_headers():
    data = tar_header("000.tokens.npy", 5) + b"hello" + bytes(507) + bytes(1024)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        (member,) = archive.getmembers()
        assert (member.name, member.size, member.mtime, member.uid, member.mode) == ("000.tokens.npy", 5, 0, 0, 0o444)
        assert archive.extractfile(member).read() == b"hello"
    with pytest.raises(ValueError, match="longer than 100 bytes"):
        tar_header("x" * 101, 1)


def test_webdataset_reads_ours(tmp_path):
    with ShardWriter(tmp_path, max_samples=4) as writer:
        for i in range(10):
            writer.write({"tokens.npy": np.arange(i, dtype=np.uint16), "meta.json": {"n": i}, "note.txt": f"é{i}"})
    urls = [str(p) for p in sorted(tmp_path.glob("*.tar"))]
    read = list(wds.WebDataset(urls, shardshuffle=False).decode())
    assert [s["__key__"] for s in read] == [f"{i:09d}" for i in range(10)]
    for i, s in enumerate(read):
        assert s["meta.json"] == {"n": i} and s["note.txt"] == f"é{i}" and s["tokens.npy"].tolist() == list(range(i))


TASKS = [
    {"sites": ["map"], "task_id": i, "start_url": "u", "intent": "i", "instantiation_dict": {f"k{i}": i}}
    | {"eval": {"eval_types": ["string_match"], "reference_answers": {"must_include": ["a"]} if i % 2 else None}}
    for i in range(7)
]
TARGETS = [{"modified": [{"uuid": i}]} if i % 2 else [] if i % 3 else "none" for i in range(7)]


def write_unlike_rows(folder: Path) -> None:
    """Samples of which no five show every key and type."""
    with ShardWriter(folder / "task", kind="web_task/1", max_samples=4) as writer:
        for task in TASKS:
            writer.write({"task.json": task, "meta.json": {"schema": "web_task/1"}})
    with ShardWriter(folder / "pair", kind="world_pair/1", max_samples=4) as writer:
        for i, target in enumerate(TARGETS):
            pair = {"prompt.json": [{"role": "user", "content": "q"}], "target.json": target}
            ids = {"tokens.npy": np.arange(i + 1, dtype=np.uint16), "roles.npy": np.ones(i + 1, dtype=np.uint8)}
            writer.write({**pair, "extra.json": {"schema": "world_pair/1", f"k{i}": [i, "x"]}, **ids})


def test_readme_for_datasets(tmp_path):
    """The columns that `datasets` would guess wrongly are in a README, and one of the user's is left alone."""
    write_unlike_rows(tmp_path)
    front = yaml.safe_load((tmp_path / "pair" / "README.md").read_text().split("---")[1])
    assert front["configs"] == [{"config_name": "default", "data_files": "*.tar"}]
    columns = {f["name"]: f.get("dtype") or f["list"] for f in front["dataset_info"]["features"]}
    ids = {"tokens.npy": "int64", "roles.npy": "int64", "__key__": "string", "__url__": "string"}
    # of types that every release knows: one that it does not know would make it refuse the folder
    assert columns == dict.fromkeys(("prompt.json", "target.json", "extra.json"), "string") | ids
    (tmp_path / "task" / "README.md").write_text("notes")
    write_card(str(tmp_path / "task"))
    assert (tmp_path / "task" / "README.md").read_text() == "notes"


def test_datasets_reads_ours(tmp_path, monkeypatch):
    """As text with any release from 4.0 on, and as values from 4.7 on, with the columns that the README names."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    write_unlike_rows(tmp_path)
    options = {"split": "train", "cache_dir": str(tmp_path / "cache")}
    tasks = datasets.load_dataset(str(tmp_path / "task"), **options)
    assert [ast.literal_eval(row["task.json"]) for row in tasks] == TASKS
    pairs = list(datasets.load_dataset(str(tmp_path / "pair"), **options))
    assert [row["target.json"] for row in pairs] == [str(target) for target in TARGETS]
    assert [len(row["tokens.npy"]) for row in pairs] == list(range(1, 8))
    if not hasattr(datasets, "Json"):
        return
    for streaming in (True, False):
        rows = {}
        for name in ("task", "pair"):
            columns = re.search(r"columns = (.*)", (tmp_path / name / "README.md").read_text())[1]
            features = datasets.Features(eval(columns, vars(datasets)))  # noqa: S307, our own README
            found = datasets.load_dataset(str(tmp_path / name), **options, features=features, streaming=streaming)
            rows[name] = list(found)
        assert [row["task.json"] for row in rows["task"]] == TASKS
        assert [row["target.json"] for row in rows["pair"]] == TARGETS
        assert rows["pair"][6]["extra.json"]["k6"] == [6, "x"]


def test_we_read_webdatasets(tmp_path):
    with wds.ShardWriter(str(tmp_path / "their-%06d.tar"), maxcount=4, verbose=0) as sink:
        for i in range(10):
            sink.write({"__key__": f"dir/sample{i}", "x.npy": np.full(3, i), "meta.json": {"n": i}, "cls": i})
    shards = ShardSet(tmp_path)
    assert len(shards) == 10
    got = sorted(Reader(shards, ShuffledOrder(shards.counts), epochs=1), key=lambda s: s["__key__"])
    for i, s in enumerate(got):
        assert (
            s["__key__"] == f"dir/sample{i}"
            and s["meta.json"] == {"n": i}
            and s["x.npy"].tolist() == [i] * 3
            and s["cls"] == b"%d" % i
        )


def test_no_worker_outlives_a_process_that_was_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib, time\n"
        "from terrella.data.shards.writer import ordered_map\n"
        "def slow(item):\n"
        f"    (pathlib.Path({str(tmp_path)!r}) / f'{{os.getpid()}}.pid').touch()\n"
        "    time.sleep(0.05)\n"
        "if __name__ == '__main__':\n"
        "    list(ordered_map(slow, range(10**6), 2, 4))\n"
    )
    owner = subprocess.Popen([sys.executable, str(program)], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    finally:
        owner.kill()
        owner.wait()
    workers = [int(path.stem) for path in tmp_path.glob("*.pid")]
    wait_until(
        lambda: (
            not any(
                p.pid in workers and p.info["status"] != psutil.STATUS_ZOMBIE for p in psutil.process_iter(["status"])
            )
        )
    )


def test_a_worker_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "DEADLINE_S", 3.0)
    begun = time.monotonic()
    with pytest.raises(DeadlineError, match="a worker did not encode 8 samples within 3 s"):
        list(writer_module.ordered_map(time.sleep, [60.0], 1))
    assert time.monotonic() - begun < 30


def wait_until(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)
