"""The index beside a shard: where each member lies, and its checksum.

A file `NAME.index` for `NAME.tar`: one line of JSON (counts, fields, the tar's size and checksum, the kind of sample,
the writer's cursor), then the keys, then little-endian tables. Nothing in it is needed to read the tar, only to read it
fast and safely. Suffixes: S samples, M members.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
import xxhash

from ..errors import ShardError
from . import store
from .tar import scan_tar, split_name

VERSION = 1
HEAD_BYTES = 65536


class Keys(Sequence[str]):
    """The keys of a shard, each made when it is asked for: a mapped index takes 4 bytes of memory a sample, a list of
    strings 60.
    """

    def __init__(self, lines: memoryview, count: int) -> None:
        self._lines, self._count = lines, count

    @cached_property
    def _starts(self) -> memoryview:
        """Where each line begins, and where one after the last would."""
        breaks = np.flatnonzero(np.frombuffer(self._lines, np.uint8) == ord("\n"))
        starts = np.empty(len(breaks) + 2, np.uint32)
        starts[0], starts[1:-1], starts[-1] = 0, breaks + 1, len(self._lines) + 1
        return starts.data

    def whole(self) -> bool:
        """Whether there are as many lines as samples."""
        return len(self._starts) == self._count + 1 if self._count else not len(self._lines)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, i: int) -> str: ...

    @overload
    def __getitem__(self, i: slice) -> list[str]: ...

    def __getitem__(self, i: int | slice) -> str | list[str]:
        if isinstance(i, slice) or i < 0:
            return list(self)[i]
        starts = self._starts
        return str(self._lines[starts[i] : starts[i + 1] - 1], "utf-8")

    def __iter__(self) -> Iterator[str]:
        return iter(str(self._lines, "utf-8").split("\n") if self._count else [])


@dataclass(frozen=True)
class ShardIndex:
    """Which member of which sample lies where."""

    keys: Sequence[str]
    fields: list[str]
    first_S1: np.ndarray  # the first member of each sample, and the number of members
    field_M: np.ndarray
    offset_M: np.ndarray
    size_M: np.ndarray
    xxh3_M: np.ndarray | None  # None: a foreign shard, never summed
    tar_bytes: int
    tar_xxh3: str
    kind: str | None = None  # "name/version", see data/schema.py
    cursor: Any = None  # where the source stood after the last sample

    def __len__(self) -> int:
        return len(self.keys)

    def to_bytes(self) -> bytes:
        """The file's content."""
        keys = "\n".join(self.keys).encode("utf-8")
        assert self.xxh3_M is not None
        tables = b"".join(
            [
                self.first_S1.astype("<u4").tobytes(),
                self.field_M.astype("<u2").tobytes(),
                self.offset_M.astype("<u8").tobytes(),
                self.size_M.astype("<u8").tobytes(),
                self.xxh3_M.astype("<u8").tobytes(),
            ]
        )
        head = {
            "terrella_index": VERSION,
            "kind": self.kind,
            "samples": len(self.keys),
            "members": len(self.field_M),
            "fields": self.fields,
            "tar_bytes": self.tar_bytes,
            "tar_xxh3": self.tar_xxh3,
            "keys_bytes": len(keys),
            "body_xxh3": xxhash.xxh3_64_hexdigest(keys + tables),
            "cursor": self.cursor,
        }
        return _encode({**head, "head_xxh3": xxhash.xxh3_64_hexdigest(_encode(head))}) + b"\n" + keys + tables


_HEAD = {
    "kind": str | None,
    "fields": list,
    "tar_xxh3": str,
    "body_xxh3": str,
    **dict.fromkeys(("samples", "members", "tar_bytes", "keys_bytes"), int),
}
_LOST = "delete it: it is made again from the tar, if dataset.json proves that the tar is whole"


def _encode(head: dict[str, Any]) -> bytes:
    return json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode("utf-8")


def index_path(tar: str) -> str:
    return tar[: -len(".tar")] + ".index"


def read_header(tar: str) -> dict[str, Any]:
    """The index's first line: counts and checksums without the tables."""
    path = index_path(tar)
    raw = store.read_head(path, HEAD_BYTES)
    return _parse_header(raw if b"\n" in raw else store.read_bytes(path), path)


def _parse_header(raw: bytes, path: str) -> dict[str, Any]:
    try:
        head = json.loads(raw.split(b"\n", 1)[0])
        version, sealed = head["terrella_index"], head.pop("head_xxh3", None)  # the first releases wrote no seal
        sound = set(head) == {*_HEAD, "terrella_index", "cursor"} and all(
            isinstance(head[key], kind) for key, kind in _HEAD.items()
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ShardError(f"not an index file; {_LOST}", shard=path) from error
    if version != VERSION:
        raise ShardError(f"index version {version}, this release reads {VERSION}; {_LOST}", shard=path)
    if (
        not sound
        or min(head["samples"], head["members"], head["keys_bytes"]) < 0
        or sealed not in (None, xxhash.xxh3_64_hexdigest(_encode(head)))
    ):
        raise ShardError(f"the first line of the index is damaged; {_LOST}", shard=path)
    return head


def load_index(tar: str) -> ShardIndex:
    """Read and check the index of a shard. Its tables stay in the mapped file, where that is local."""
    path = index_path(tar)
    whole = memoryview(store.read_bytes(path)) if store.is_url(path) else store.view(path)
    assert isinstance(whole, memoryview)
    line = bytes(whole[:HEAD_BYTES])
    if b"\n" not in line:
        line = bytes(whole)
    head = _parse_header(line, path)
    body = whole[line.find(b"\n") + 1 :]
    if xxhash.xxh3_64_hexdigest(body) != head["body_xxh3"]:
        raise ShardError(f"the index is damaged (checksum); {_LOST}", shard=path)
    samples, members, at = head["samples"], head["members"], head["keys_bytes"]
    keys = Keys(body[:at], samples)
    tables = []
    parts = (("<u4", samples + 1), ("<u2", members), ("<u8", members), ("<u8", members), ("<u8", members))
    if not keys.whole() or len(body) != at + sum(np.dtype(dtype).itemsize * count for dtype, count in parts):
        raise ShardError(f"the index's counts do not fit its tables; {_LOST}", shard=path)
    for dtype, count in parts:
        tables.append(np.frombuffer(body, dtype, count, at))
        at += tables[-1].nbytes
    first, field, offset, size, sums = tables
    if members and int(field.max()) >= len(head["fields"]):
        raise ShardError(f"the index names {len(head['fields'])} fields and uses more; {_LOST}", shard=path)
    return ShardIndex(
        keys,
        head["fields"],
        first,
        field,
        offset,
        size,
        sums,
        head["tar_bytes"],
        head["tar_xxh3"],
        head["kind"],
        head["cursor"],
    )


def scan_index(tar: str, data: store.Bytes, *, sums: bool = False, kind: str | None = None) -> ShardIndex:
    """An index made from the tar itself: how shards of other writers are read. Consecutive members of one key are
    one sample.
    """
    keys: list[str] = []
    fields: dict[str, int] = {}
    first, field_of, offsets, sizes = [], [], [], []
    here: set[str] = set()
    seen: set[str] = set()
    for name, offset, size in scan_tar(data, tar):
        divided = split_name(name)
        if divided is None:
            continue
        key, field = divided
        if "\n" in key:
            raise ShardError("a key holds a line break", shard=tar, sample=repr(key))
        if not keys or key != keys[-1]:
            if key in seen:
                raise ShardError("the key occurs twice; keys must be unique in a shard", shard=tar, sample=key)
            seen.add(key)
            keys.append(key)
            first.append(len(field_of))
            here = set()
        if field in here:
            raise ShardError("the field occurs twice in one sample", shard=tar, sample=key, field=field)
        here.add(field)
        field_of.append(fields.setdefault(field, len(fields)))
        offsets.append(offset)
        sizes.append(size)
    found = None
    if sums:
        found = np.array(
            [xxhash.xxh3_64_intdigest(data[o : o + s]) for o, s in zip(offsets, sizes, strict=True)], dtype="<u8"
        )
    return ShardIndex(
        keys,
        list(fields),
        np.array([*first, len(field_of)], dtype="<u4"),
        np.array(field_of, dtype="<u2"),
        np.array(offsets, dtype="<u8"),
        np.array(sizes, dtype="<u8"),
        found,
        len(data),
        store.checksum(data) if sums else "",
        kind,
    )
