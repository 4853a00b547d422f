"""Reading at the size of a cluster: which files are opened, by which rank, and how many bytes travel and stay."""

import contextlib
import json
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from terrella.core.errors import StorageError
from terrella.core.mesh import Mesh
from terrella.data.balance import dealt
from terrella.data.shards import Reader, ShardSet, ShardWriter, ShuffledOrder, store
from terrella.data.shards.index import load_index
from terrella.data.shards.verify import verify

SHARDS, EACH = 64, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("many") / "shards"
    with ShardWriter(made, max_samples=EACH) as writer:
        for i in range(SHARDS * EACH):
            writer.write({"n.json": i, "pad.bin": bytes([i % 256]) * 4000})
    return made


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each small file is read."""
    seen: Counter[str] = Counter()
    for name in ("read_bytes", "read_head", "view"):
        plain = getattr(store, name)

        def counted(path: object, *more: int, plain=plain, **options: int) -> object:
            seen[Path(str(path)).name] += 1
            return plain(path, *more, **options)

        monkeypatch.setattr(store, name, counted)
    return seen


def test_a_folder_is_opened_by_its_card_alone(folder: Path, reads: Counter[str]) -> None:
    shards = ShardSet(folder)
    assert len(shards) == SHARDS * EACH and reads == {"dataset.json": 1}
    assert shards[EACH]["n.json"] == EACH and shards.opened == 1
    assert reads == {"dataset.json": 1, "shard-000001.tar": 1, "shard-000001.index": 1}


def test_the_quarantine_is_read_once_for_all_shards(folder: Path, reads: Counter[str]) -> None:
    bad = [{"shard": f"shard-{s:06d}.tar", "sample": f"{s * EACH + 1:09d}"} for s in (0, 3)]
    (folder / "quarantine.json").write_text(json.dumps({"samples": bad}))
    try:
        shards = ShardSet(folder)
        left = [s["n.json"] for s in Reader(shards, ShuffledOrder(shards.counts, shuffle=False), epochs=1)]
        assert left == [i for i in range(SHARDS * EACH) if i not in (1, 3 * EACH + 1)]
        assert reads["quarantine.json"] == reads["dataset.json"] == 1
        found = verify(folder)
        assert found.already_aside == 2 and not found.problems
        assert reads["quarantine.json"] == reads["dataset.json"] == 2
    finally:
        (folder / "quarantine.json").unlink()


def test_a_window_opens_each_shard_once_an_epoch(folder: Path) -> None:
    def opened(window: int) -> int:
        shards = ShardSet(folder, keep_open=32)
        order = ShuffledOrder(shards.counts, seed=3, window=window)
        assert sorted(shards[order[place]]["n.json"] for place in range(order.size)) == list(range(order.size))
        return shards.opened

    assert opened(16) == SHARDS and opened(0) > 3 * SHARDS


@pytest.mark.parametrize("count", [1, 5, 16])
def test_few_shards_are_shuffled_as_a_whole(count: int) -> None:
    """The default window changes nothing for a folder of at most 16 shards, such as those of the golden files."""
    counts, places = [7 + i for i in range(count)], np.arange(500)
    windowed, whole = ShuffledOrder(counts, seed=9), ShuffledOrder(counts, seed=9, window=0)
    assert windowed.ids(places).tolist() == whole.ids(places).tolist() == [windowed[i] for i in places.tolist()]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_opens_its_own_shards_and_steps_are_the_same_at_every_layout(folder: Path, ranks: int) -> None:
    order = ShuffledOrder([EACH] * SHARDS, seed=5)
    steps = [[order[place] for place in range(s, s + 32)] for s in range(0, order.size, 32)]
    opened = []
    for rank in range(ranks):
        shards, mesh = ShardSet(folder), Mesh(rank, ranks)
        for step in steps:
            for number in dealt(step, mesh):
                assert shards[number]["n.json"] == number
        opened.append(shards.opened)
    for step in steps:
        parts = [dealt(step, Mesh(rank, ranks)) for rank in range(ranks)]
        assert sorted(n for part in parts for n in part) == sorted(step) and {len(p) for p in parts} == {32 // ranks}
    # its part of each window's shards, and those beside it, which the borders between ranks wander through
    windows = SHARDS // 16
    assert max(opened) <= windows * (16 // ranks + 4) and sum(opened) < ranks * SHARDS
    assert dealt(steps[0], Mesh(0, 1)) == steps[0]  # alone the order of the stream stays


def test_an_open_shard_holds_a_few_bytes_a_sample(tmp_path: Path) -> None:
    count = 20_000
    with ShardWriter(tmp_path) as writer:
        for i in range(count):
            writer.write({"n.json": i})
    shards = ShardSet(tmp_path)
    tracemalloc.start()
    assert shards[count - 1]["n.json"] == count - 1
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 8 * count and peak < 40 * count


def test_a_thousand_million_samples_take_little_memory(tmp_path: Path) -> None:
    """What docs/lab/engine.md states: folder and order of 10,000 shards of 100,000, before any of them is opened."""
    count, each = 10_000, 100_000
    with ShardWriter(tmp_path) as writer:
        writer.write({"n.json": 0})
    card = json.loads((tmp_path / "dataset.json").read_text())
    del card["card_xxh3"]  # the first releases wrote none
    names = [f"shard-{i:06d}.tar" for i in range(count)]
    card["shards"] = [{"name": name, "samples": each, "bytes": 1 << 28, "xxh3": "0" * 16} for name in names]
    (tmp_path / "dataset.json").write_text(json.dumps(card))
    for name in names:
        (tmp_path / name).touch()
    tracemalloc.start()
    shards = ShardSet(tmp_path)
    order = ShuffledOrder(shards.counts, seed=1)
    assert len(shards) == 10**9 and 0 <= order[0] != order[10**9 - 1] < 10**9
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 48e6 and peak < 96e6


def test_keys_of_an_index_are_a_sequence(tmp_path: Path) -> None:
    keys = ["a", "dir/é", "zz"]
    with ShardWriter(tmp_path) as writer:
        for key in keys:
            writer.write({"n.json": 0}, key=key)
    found = load_index(str(tmp_path / "shard-000000.tar")).keys
    assert list(found) == keys and [found[i] for i in (0, 1, 2)] == keys and found[-1] == "zz" and found[1:] == keys[1:]
    assert "dir/é" in found and "x" not in found and found.index("zz") == 2
    with pytest.raises(IndexError):
        found[3]
    with pytest.raises(IndexError):
        ShardSet(tmp_path)[3]


class Serving(BaseHTTPRequestHandler):
    """Files over HTTP with range requests, which are counted; no folder is listed."""

    root: Path
    ranges: bool
    sent: Counter[str]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = self.root / self.path.lstrip("/")
        found = path.is_file()
        data = path.read_bytes() if found else b""
        wanted = self.headers.get("Range") if self.ranges else None
        if wanted:
            first, last = wanted.removeprefix("bytes=").split("-")
            data = data[int(first) : int(last) + 1 if last else None]
        self.send_response((206 if wanted else 200) if found else 404)
        self.send_header("Content-Length", str(len(data)))
        if self.ranges:
            self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if with_body:
            self.wfile.write(data)
            self.sent[path.suffix] += len(data)
            self.sent["largest"] = max(self.sent["largest"], len(data) if path.suffix == ".tar" else 0)

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client that keeps its connections and goes
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[str, type[Serving]]]:
    pytest.importorskip("fsspec")
    pytest.importorskip("aiohttp")
    handler = type("Here", (Serving,), {"root": folder, "ranges": True, "sent": Counter()})
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}", handler
    httpd.shutdown()
    httpd.server_close()
    thread.join(timeout=30)


def test_samples_behind_a_url_are_fetched_by_ranges(server: tuple[str, type[Serving]], folder: Path) -> None:
    url, handler = server
    here, there = ShardSet(folder), ShardSet(url)
    assert there.fingerprint == here.fingerprint and not handler.sent[".tar"]
    assert there[100] == here[100] and handler.sent[".tar"] < 7000  # one sample of a shard of 42 kB
    handler.sent.clear()
    order = ShuffledOrder(here.counts, seed=2)
    assert list(Reader(there, order, epochs=1)) == list(Reader(here, order, epochs=1))
    tars = sum(path.stat().st_size for path in folder.glob("*.tar"))
    assert handler.sent["largest"] < 7000 and handler.sent[".tar"] < tars  # members and what lies between, once
    assert not verify(url).problems


def test_a_server_without_ranges_or_shards_is_refused(server: tuple[str, type[Serving]]) -> None:
    url, handler = server
    with pytest.raises(StorageError, match=r"gone-000000\.tar: cannot be read: FileNotFoundError"):
        ShardSet(f"{url}/gone-000000.tar")
    handler.ranges = False
    with pytest.raises(StorageError, match=r"shard-000012\.tar: asked for the bytes .* must answer range requests"):
        ShardSet(url)[100]


def test_fields_alone_are_fetched_and_a_fetch_is_bounded(
    server: tuple[str, type[Serving]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = server
    shards = ShardSet(url, fields=["n.json"])
    assert [shards[i] for i in (0, 9)] == [{"__key__": f"{i:09d}", "n.json": i} for i in (0, 9)]
    assert handler.sent[".tar"] == 2  # a digit each
    asked: list[int] = []
    plain = store.read_ranges

    def counted(wanted: list[tuple[str, int, int]]) -> list[memoryview]:
        asked.append(sum(stop - start for _, start, stop in wanted))
        return plain(wanted)

    monkeypatch.setattr(store, "read_ranges", counted)
    monkeypatch.setattr("terrella.data.shards.dataset.FETCHED", 20_000)
    whole = ShardSet(url)
    assert [s["n.json"] for s in whole.read_many(np.arange(40))] == list(range(40))
    assert len(asked) > 5 and max(asked) <= 20_000
