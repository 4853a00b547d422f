"""Reader throughput on one core, beside the webdataset library and a raw read of the same tars in the same run.

Times are CPU seconds of the one process that reads, files in the page cache, so a busy machine does not change them
much. Every reader hands over decoded samples, but for members of a megabyte, where all hand over bytes.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ..data import codecs
from ..data.schema import TRANSITION
from ..data.shards import Reader, ShardSet, ShardWriter, ShuffledOrder
from . import record

MB = 1 << 20


def make_cases(root: Path, scale: float) -> dict[str, tuple[Path, int]]:
    """Folders of shards: small JSON, JSON of a text game's size, token arrays of 4 kB, members of 1 and 4 MB."""
    rng = np.random.default_rng(0)
    state = {
        "objects": [
            {"name": f"thing {i}", "uuid": i, "properties": {"open": True, "mass": 1.5}, "contains": []}
            for i in range(40)
        ]
    }
    cases: dict[str, tuple[str, int, Callable[[int], dict], int]] = {
        "json 0.2 kB": (
            "json",
            20_000,
            lambda i: {"t.json": {"schema": TRANSITION, "state": "#" * 60, "action": i, "next_state": "." * 60}},
            64,
        ),
        "json 4 kB": ("json4", 5_000, lambda i: {"t.json": {"schema": TRANSITION, "state": state, "action": i}}, 64),
        "tokens 4 kB": ("tokens", 20_000, lambda i: {"tokens.npy": rng.integers(0, 4375, 2048).astype(np.uint16)}, 64),
        "bytes 1 MB": ("mb1", 256, lambda i: {"x.bin": rng.bytes(MB)}, 128),
        "bytes 4 MB": ("mb4", 64, lambda i: {"x.bin": rng.bytes(4 * MB)}, 128),
    }
    made = {}
    for name, (folder, count, make, megabytes) in cases.items():
        count = max(32, int(count * scale))
        with ShardWriter(root / folder, max_bytes=megabytes * MB) as writer:
            for i in range(count):
                writer.write(make(i))
        made[name] = (root / folder, count)
    return made


def ours(folder: Path, *, check: bool, decode: bool) -> Callable[[], int]:
    shards = ShardSet(folder, check=check, decode=decode)
    order = ShuffledOrder(shards.counts, seed=1)
    return lambda: sum(1 for _ in Reader(shards, order, epochs=1))


def with_json_of_python(run: Callable[[], int]) -> Callable[[], int]:
    """The same without orjson: what it costs where the extra `data` is not installed."""

    def without() -> int:
        kept, codecs.orjson = codecs.orjson, None
        try:
            return run()
        finally:
            codecs.orjson = kept

    return without


def webdataset_reader(folder: Path, *, decode: bool) -> Callable[[], int]:
    import webdataset

    urls = [str(p) for p in sorted(folder.glob("*.tar"))]

    def run() -> int:
        stream = webdataset.WebDataset(urls, shardshuffle=False)
        return sum(1 for _ in (stream.decode() if decode else stream))

    return run


def raw_read(folder: Path, count: int) -> Callable[[], int]:
    paths = sorted(folder.glob("*.tar"))

    def run() -> int:
        for path in paths:
            with open(path, "rb", buffering=0) as stream:
                while stream.read(MB):
                    pass
        return count

    return run


def measure(readers: dict[str, Callable[[], int]], repeats: int, count: int) -> dict[str, list[float]]:
    """CPU seconds a sample, every reader once a round, so that all see the same moments of the machine; the first
    round warms up.
    """
    spent: dict[str, list[float]] = {name: [] for name in readers}
    for repeat in range(repeats + 1):
        for name, run in readers.items():
            start = time.process_time()
            seen = run()
            if seen != count:
                raise RuntimeError(f"{name} gave {seen} samples of {count}")
            if repeat:
                spent[name].append((time.process_time() - start) / count)
    return spent


def lessons(folder: Path, window: int, take: int) -> Callable[[], int]:
    """Samples one by one in a shuffled order, as an sft stage asks for them, of more shards than are kept open."""
    shards = ShardSet(folder)
    order = ShuffledOrder(shards.counts, seed=1, window=window)
    return lambda: sum(1 for place in range(take) if shards[order[place]])


def many_shards(root: Path, scale: float) -> tuple[Path, int]:
    """256 shards of small transitions: more than a ShardSet keeps open, fewer files than a benchmark should leave."""
    each = max(16, int(2000 * scale))
    with ShardWriter(root / "many", max_samples=each) as writer:
        for i in range(256 * each):
            writer.write({"t.json": {"schema": TRANSITION, "state": "#" * 60, "action": i, "next_state": "." * 60}})
    return root / "many", each


def resume_cost(repeats: int) -> Iterator[tuple[str, list[float]]]:
    """Seconds until the next id is known, at the beginning and far into a large dataset (1,000 shards of 10,000
    samples).
    """
    for name, position in (("position 0", 0), ("position 5e6", 5_000_000), ("position 1e9", 10**9)):
        times = []
        for _ in range(repeats):
            order = ShuffledOrder(np.full(1000, 10_000), seed=1)
            start = time.process_time()
            order.ids(np.arange(position, position + 1))
            times.append(time.process_time() - start)
        yield name, times


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full number of samples")
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    parser.add_argument("--dry-run", action="store_true", help="print only")
    given = parser.parse_args()
    import webdataset

    versions = f"python {platform.python_version()} numpy {np.__version__} webdataset {webdataset.__version__}"
    recorder = record.Recorder(
        "data", f"python -m terrella.benchmarks.data --repeats {given.repeats} --scale {given.scale:g}", "", versions
    )
    root = Path(tempfile.mkdtemp(prefix="terrella-bench-"))
    try:
        for case, (folder, count) in make_cases(root, given.scale).items():
            whole = case.startswith("bytes")
            readers = {
                "terrella": ours(folder, check=True, decode=not whole),
                "terrella, no checksum": ours(folder, check=False, decode=not whole),
                "webdataset": webdataset_reader(folder, decode=not whole),
                "raw read": raw_read(folder, count),
            }
            if case.startswith("json"):
                readers["terrella, without orjson"] = with_json_of_python(readers["terrella"])
            size = sum(p.stat().st_size for p in folder.glob("*.tar"))
            for impl, spent in measure(readers, given.repeats, count).items():
                low, middle, high = np.quantile(np.array(spent), [0.2, 0.5, 0.8]).tolist()
                if whole:
                    rates = [size / count / s / 1e6 for s in (high, middle, low)]
                    recorder.add(case, impl, "bandwidth", rates[1], "MB/s", rates[0], rates[2])
                else:
                    recorder.add(case, impl, "time a sample", middle * 1e6, "us", low * 1e6, high * 1e6)
        folder, each = many_shards(root, given.scale)
        for impl, window, take in (("window of 16 shards", 16, 16 * each), ("over all shards", 0, each)):
            readers = {impl: lessons(folder, window, take)}
            rates = [1 / second for second in measure(readers, given.repeats, take)[impl]]
            low, middle, high = np.quantile(np.array(rates), [0.2, 0.5, 0.8]).tolist()
            recorder.add("lessons of 256 shards", impl, "samples", middle, "1/s", low, high)
        for name, times in resume_cost(given.repeats):
            low, middle, high = (np.quantile(np.array(times), [0.2, 0.5, 0.8]) * 1e3).tolist()
            recorder.add(f"resume, {name}", "terrella", "time to the next id", middle, "ms", low, high)
    finally:
        shutil.rmtree(root)
    for row in recorder.rows:
        print(f"{row.case:24} {row.impl:24} {row.value:12.2f} {row.unit:5} [{row.p20:.2f}, {row.p80:.2f}]")
    if not given.dry_run:
        record.append(recorder.rows, given.out)
        print(json.dumps({"rows": len(recorder.rows), "file": str(given.out)}))


if __name__ == "__main__":
    main()
