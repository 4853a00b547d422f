"""A user's rows under attack: changed by a seeded draw, or odd by hand. Read as they are, or refused by file; none
crashes or hangs.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import time
from pathlib import Path

import pytest

from terrella.core.by_path import OwnFile
from terrella.core.errors import ConfigError, TerrellaError
from terrella.data.rows import demonstration, info_of, read_rows, render_prompt, rows_digest
from terrella.data.tokenizers import ByteTokenizer
from terrella.rl.own.config import DataEnvironment
from terrella.rl.own.tasks import load_rows, open_tasks

SEED = 20261116
ROWS = [
    {"prompt": f"{i} + {i}? ☃", "answer": 2 * i, "more": {"of": [i, None, 0.5]}, "tags": ["a", f"{i}"]}
    for i in range(12)
]
HOSTILE = [
    "NaN",
    "-Infinity",
    "1e999",
    "9" * 5000,
    '"\\ud800"',
    "null",
    "[[[[",
    "{}",
    '"\\u0000"',
    "tru",
    '{"a": 1, "a": 2}',
    "\ufeff",
    "0x1",
]


def use(path: Path) -> int:
    """What a run asks of rows, for all of them."""
    rows = read_rows(path)
    for i in range(len(rows)):
        row, where = rows[i], rows.where(i)
        for text in (
            str(render_prompt(row, None, where)),
            demonstration(row, None, where) or "",
            json.dumps(info_of(row), default=str),
        ):
            text.encode()
    return len(rows)


def files(folder: Path) -> list[Path]:
    """The same rows in every format."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    folder.mkdir()
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "a.json").write_text(json.dumps(ROWS))
    table = pa.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, folder / "a.parquet")
    with pa.OSFile(str(folder / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sorted(folder.iterdir())


def damage(held: bytes, draw: random.Random) -> bytes:
    how = draw.randrange(6)
    data, place = bytearray(held), draw.randrange(len(held))
    if how < 2:
        data[place] ^= 1 << draw.randrange(8)
    elif how == 2:
        del data[place:]
    elif how == 3:
        data[place:place] = draw.choice(HOSTILE).encode("utf-8", "surrogatepass")
    elif how == 4:
        data[place : place + 64] = bytes(64)
    else:
        values = [i for i in range(len(data)) if data[i : i + 2] == b": "]
        if values:
            place = draw.choice(values) + 2
            data[place : place + 1] = draw.choice(HOSTILE).encode("utf-8", "surrogatepass")
    return bytes(data)


def attack(count: int, folder: Path, seed: int) -> dict[str, int]:
    whole, counts = files(folder / "whole"), {"read": 0, "refused": 0}
    for i in range(count):
        draw = random.Random(f"{seed}/{i}")
        victim = draw.choice(whole)
        path = folder / f"rows-{i}{''.join(victim.suffixes)}"
        path.write_bytes(damage(victim.read_bytes(), draw))
        begun = time.process_time()
        try:
            use(path)
            counts["read"] += 1
        except TerrellaError as error:
            assert path.name in str(error), str(error)
            counts["refused"] += 1
        assert time.process_time() - begun < 10
        path.unlink()
    return counts


def test_rows(tmp_path: Path) -> None:
    counts = attack(100, tmp_path, SEED)
    print(counts)
    assert counts["refused"] >= 40 and counts["read"] >= 5


@pytest.mark.full
def test_all_rows(tmp_path: Path) -> None:
    counts = attack(2000, tmp_path, SEED + 1)
    print(counts)
    assert counts["refused"] >= 800


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "a", "prompt": "b"}', r"a\.jsonl:1: not JSON: the name 'prompt' is there twice"),
        ('{"prompt": "a", "answer": 1e999}', r"a\.jsonl:1: not JSON: 1e999 is beyond the range"),
        ('{"prompt": "a \\ud800 b", "answer": 1}', r"a\.jsonl:1: not JSON: .*surrogates not allowed"),
        ('{"prompt": "a", "x": ' + "9" * 5000 + "}", r"a\.jsonl:1: not JSON: .*digits"),
        ('{"prompt": "a", "x": ' + "[" * 100_000 + "}", r"a\.jsonl:1: not JSON: .*recursion"),
    ],
)
def test_what_the_parser_would_make_something_else_of_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(TerrellaError, match=words):
        use(tmp_path / "a.jsonl")


def test_half_a_surrogate_pair_of_a_template_is_named_by_the_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "a"}\n{"question": "b"}\n')
    template = r"{{ question }}{{ '\ud800' if question == 'b' }}"
    with pytest.raises(TerrellaError, match=r"a\.jsonl:2: no tokenizer can read its prompt .*surrogates not allowed"):
        load_rows(str(tmp_path / "a.jsonl"), template, None, None)


def test_odd_files_are_read_or_named(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "x" * 10_000_000, "answer": "y"})
    (tmp_path / "long.jsonl").write_text(line)
    (tmp_path / "mark.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": "b"}\r\n')
    assert use(tmp_path / "long.jsonl") == use(tmp_path / "mark.jsonl") == 1
    (tmp_path / "wide.jsonl").write_bytes(line[:40].encode("utf-16"))
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    (tmp_path / "named.jsonl").mkdir()
    for name in ("wide.jsonl", "loop.jsonl", "named.jsonl"):
        with pytest.raises(TerrellaError, match=name):
            use(tmp_path / name)
    for name, make in {"pipe": os.mkfifo, "loop": lambda path: path.symlink_to(path), "folder": Path.mkdir}.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name / "a.jsonl")
        with pytest.raises(TerrellaError, match=rf"{name}/a\.jsonl"):  # and does not wait for a writer
            use(tmp_path / name)
    # reading others of them, such as /proc/kmsg, never ends
    (tmp_path / "kernel.jsonl").symlink_to("/proc/self/status")
    for read in (use, rows_digest):
        with pytest.raises(TerrellaError, match=r"kernel\.jsonl: is no regular file on a disk"):
            read(tmp_path / "kernel.jsonl")


def test_tables_with_types_that_json_has_not(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    columns = {
        "prompt": ["a", "b"],
        "answer": pa.array([1.0, float("nan")]),
        "pairs": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64())),
        "when": pa.array([2**50, 0], pa.timestamp("s")),
        "bytes": [b"\xff", b""],
        "deep": [[[{"x": [None]}]], None],
    }
    for leave, words in (
        ((), r"t\.parquet: row 1: column 'when' cannot be read"),
        (("when",), r"t\.parquet: row 2: the answer is nan"),
    ):
        pyarrow.parquet.write_table(
            pa.table({k: v for k, v in columns.items() if k not in leave}), tmp_path / "t.parquet"
        )
        with pytest.raises(TerrellaError, match=words):
            use(tmp_path / "t.parquet")


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_path_to_no_rows_is_named_with_its_setting(split: str) -> None:
    settings = DataEnvironment("data", **{split: OwnFile("nowhere.jsonl")})
    with pytest.raises(ConfigError, match=rf"env\.{split}: nowhere\.jsonl: no such file or folder"):
        with open_tasks(settings, ByteTokenizer(), 64):
            pass
