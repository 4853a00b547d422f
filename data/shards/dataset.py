"""Random access to the samples of a folder of shards: mapped or fetched by ranges, checked, decoded.

A folder is opened by its card, which is one small file for any number of shards. A shard is opened when a sample of it
is asked for, and holds no Python object a sample: the index's tables stay in the mapped file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from ...core.errors import ConfigError
from .. import codecs
from ..errors import ShardError
from ..schema import KINDS
from . import store
from .card import CARD, KEEP, Folder, folder_of, open_index
from .index import ShardIndex, read_header

FETCHED = 64 << 20  # bytes of samples asked of an object store at a time
_sum = xxhash.xxh3_64_intdigest


class Shard:
    """One open shard."""

    def __init__(
        self,
        path: str,
        folder: Folder,
        *,
        check: bool = True,
        decode: bool = True,
        fields: Sequence[str] | None = None,
    ) -> None:
        self.path, self.aside = path, folder.aside.get(store.base_name(path), frozenset())
        self.data = store.view(path)
        self.index: ShardIndex = open_index(path, self.data, folder)
        index = self.index
        if index.tar_bytes != len(self.data):
            self._torn()
        self.check = check and index.xxh3_M is not None
        self.keys = index.keys
        plain: Callable[[memoryview], Any] = bytes
        self._fields = [(f, codecs.decoder(f) if decode else plain) for f in index.fields]
        self._wanted = None if fields is None else {i for i, name in enumerate(index.fields) if name in set(fields)}
        self._first, self._field = _numbers(index.first_S1, "I"), _numbers(index.field_M, "H")
        self._offset, self._size = _numbers(index.offset_M, "Q"), _numbers(index.size_M, "Q")
        self._sums = _numbers(index.xxh3_M, "Q") if index.xxh3_M is not None else self._size
        self._require(fields)

    def __len__(self) -> int:
        return len(self.keys)

    def span(self, i: int) -> tuple[int, int]:
        """Where the bytes of a sample begin and end."""
        members = range(self._first[i], self._first[i + 1])
        members = [m for m in members if self._wanted is None or self._field[m] in self._wanted]
        if not members:
            return 0, 0
        ends = [self._offset[m] + self._size[m] for m in members]
        return min(self._offset[m] for m in members), max(ends)

    def sample(self, i: int, held: memoryview | None = None) -> dict[str, Any]:
        """A decoded sample: its fields, and its key under "__key__". `held` are the bytes of its span."""
        data, base, wanted, check = self.data, 0, self._wanted, self.check
        offsets, sizes, fields = self._offset, self._size, self._field
        if type(data) is not memoryview:
            base, end = self.span(i)
            data = data[base:end] if held is None else held
        out: dict[str, Any] = {"__key__": self.keys[i]}
        for m in range(self._first[i], self._first[i + 1]):
            field, start = fields[m], offsets[m] - base
            if wanted is not None and field not in wanted:
                continue
            part = data[start : start + sizes[m]]
            name, decode = self._fields[field]
            if check and _sum(part) != self._sums[m]:
                raise ShardError(
                    "checksum differs: the bytes changed since they were written",
                    shard=self.path,
                    sample=self.keys[i],
                    field=name,
                )
            try:
                out[name] = decode(part)
            except Exception as error:
                raise ShardError(
                    f"cannot be decoded: {error}", shard=self.path, sample=self.keys[i], field=name
                ) from error
        return out

    def _require(self, fields: Sequence[str] | None) -> None:
        """No sample may lack a field that its kind, or the caller, needs."""
        index = self.index
        needed = list(fields) if fields is not None else (KINDS[index.kind].required if index.kind in KINDS else [])
        if index.kind is not None and index.kind not in KINDS:
            raise ShardError(f"holds {index.kind} samples; this release reads {', '.join(KINDS)}", shard=self.path)
        if not len(self) or _has_all(index, needed):
            return
        owner_M = np.repeat(np.arange(len(self)), np.diff(index.first_S1.astype(np.int64)))
        for name in needed:
            have = np.zeros(len(self), bool)
            if name in index.fields:
                have[owner_M[index.field_M == index.fields.index(name)]] = True
            have[[i for i, key in enumerate(self.keys) if key in self.aside] if self.aside else []] = True
            if not have.all():
                raise ShardError("missing", shard=self.path, sample=self.keys[int(np.argmin(have))], field=name)

    def _torn(self) -> None:
        """The file is not as long as it was: tolerable only when every sample that lost something is in quarantine."""
        reason = f"the tar has {len(self.data)} bytes, its index says {self.index.tar_bytes}"
        lost = lost_members(self.index, len(self.data))
        for key, field in lost:
            if key not in self.aside:
                raise ShardError(f"{reason}; the first lost member is this", shard=self.path, sample=key, field=field)
        if not lost and len(self.data) > self.index.tar_bytes:
            raise ShardError(reason, shard=self.path)


def _numbers(table: np.ndarray, code: Literal["H", "I", "Q"]) -> memoryview:
    """A table whose entries come out as Python's integers, several times as fast as numpy's; the file it lies in is
    not aligned.
    """
    return table.view(np.uint8).data.cast(code) if len(table) else memoryview(b"")


def _has_all(index: ShardIndex, needed: Sequence[str]) -> bool:
    """Whether every sample has the same fields, the needed ones among them; False may also mean that nobody looked."""
    samples, members = len(index), len(index.field_M)
    each = members // samples
    alike = members == each * samples and bool((np.diff(index.first_S1) == each).all())
    if not alike or not bool((index.field_M.reshape(samples, each) == index.field_M[:each]).all()):
        return False
    return {index.fields[f] for f in index.field_M[:each].tolist()} >= set(needed)


def lost_members(index: ShardIndex, size: int) -> list[tuple[str, str]]:
    """(sample, field) of the members that do not lie within the first `size` bytes."""
    lost = np.flatnonzero((index.offset_M + index.size_M).astype(np.int64) > size)
    owners = np.searchsorted(index.first_S1, lost, side="right") - 1
    return [(index.keys[int(s)], index.fields[int(index.field_M[m])]) for s, m in zip(owners, lost, strict=True)]


class ShardSet:
    """The samples of a folder (or of a list of tars), numbered in the order of the shard names.

    Samples named in quarantine.json are not counted and never read. `check` compares every member's checksum before it
    is decoded.
    """

    def __init__(
        self,
        where: str | Path | Sequence[str | Path],
        *,
        check: bool = True,
        decode: bool = True,
        fields: Sequence[str] | None = None,
        keep_open: int = 64,
    ) -> None:
        self.check, self.decode, self.fields, self.keep_open = check, decode, fields, keep_open
        self.paths, self._folders = find_shards(where)
        self._remote = store.is_url(self.paths[0])
        if any(store.is_url(path) != self._remote for path in self.paths):
            raise ConfigError(f"{self.paths[0]}, {self.paths[-1]}: give shards of a store or of a folder, not of both")
        self.opened = 0  # shards, for a look at how reading is spread
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self.quarantined = 0
        counts, digest = [], xxhash.xxh3_64()
        self._kept: dict[int, np.ndarray] = {}
        for number, path in enumerate(self.paths):
            name, folder = store.base_name(path), self._folders[folder_of(path)]
            stated = folder.stated.get(name)
            if stated is not None:
                count, sums = stated["samples"], stated["xxh3"]
            elif folder.has_index(path):
                head = read_header(path)
                count, sums = head["samples"], head["tar_xxh3"]
            else:
                count, sums = len(self.shard(number)), self.shard(number).index.tar_xxh3 or str(store.file_size(path))
            if name in folder.aside:
                aside, keys = folder.aside[name], self.shard(number).keys
                self._kept[number] = np.array([i for i, k in enumerate(keys) if k not in aside], dtype=np.int64)
                self.quarantined += count - len(self._kept[number])
                count = len(self._kept[number])
            counts.append(count)
            digest.update(f"{name} {count} {sums}\n".encode())
        self.counts = np.array(counts, dtype=np.int64)
        self.ends = np.cumsum(self.counts)
        self._starts = [0, *self.ends.tolist()]
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return int(self.ends[-1])

    def kind(self, number: int) -> str | None:
        """What a shard holds, by the card where that says so."""
        path = self.paths[number]
        stated = self._folders[folder_of(path)].stated.get(store.base_name(path))
        return stated["kind"] if stated and stated["kind"] else self.shard(number).index.kind

    def shard(self, number: int) -> Shard:
        """An open shard; the least recently used one is closed when too many are open."""
        found = self._open.get(number)
        if found is None:
            path = self.paths[number]
            folder = self._folders[folder_of(path)]
            found = Shard(path, folder, check=self.check, decode=self.decode, fields=self.fields)
            self.opened += 1
            self._open[number] = found
            if len(self._open) > self.keep_open:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(number)
        return found

    def __getitem__(self, i: int) -> dict[str, Any]:
        number = bisect_right(self._starts, i) - 1
        if not 0 <= i < self._starts[-1]:
            raise IndexError(f"sample {i} of {len(self)}")
        return self.shard(number).sample(self._inside(number, i - self._starts[number]))

    def read_many(self, ids: np.ndarray) -> Iterator[dict[str, Any]]:
        """The samples of many ids in that order, one by one. Those of object stores are fetched together, as many as
        FETCHED bytes hold.
        """
        numbers = np.searchsorted(self.ends, ids, side="right")
        inside = ids - (self.ends - self.counts)[numbers]
        if self._remote:
            yield from self._fetch(numbers.tolist(), inside.tolist())
            return
        last, shard = -1, None
        for number, i in zip(numbers.tolist(), inside.tolist(), strict=True):
            if number != last:
                last, shard = number, self.shard(number)
            assert shard is not None
            yield shard.sample(i if number not in self._kept else self._inside(number, i))

    def _fetch(self, numbers: list[int], inside: list[int]) -> Iterator[dict[str, Any]]:
        waiting: list[tuple[Shard, int, int, int]] = []
        size = 0
        for number, i in zip(numbers, inside, strict=True):
            shard, at = self.shard(number), self._inside(number, i)
            start, stop = shard.span(at)
            if waiting and size + stop - start > FETCHED:
                yield from _fetched(waiting)
                waiting, size = [], 0
            waiting.append((shard, at, start, stop))
            size += stop - start
        yield from _fetched(waiting)

    def _inside(self, number: int, i: int) -> int:
        kept = self._kept.get(number)
        return int(i) if kept is None else int(kept[i])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}  # a worker process maps the files itself


def _fetched(waiting: Sequence[tuple[Shard, int, int, int]]) -> Iterator[dict[str, Any]]:
    held = store.read_ranges([(shard.path, start, stop) for shard, _, start, stop in waiting])
    return (shard.sample(i, data) for (shard, i, _, _), data in zip(waiting, held, strict=True))


def find_shards(where: str | Path | Sequence[str | Path], complete: bool = True) -> tuple[list[str], dict[str, Folder]]:
    """Tars of a folder in name order, or the given ones, and what is known of their folders. A folder must hold all
    that its card lists, unless that is not asked for.
    """
    if not isinstance(where, str | Path) or str(where).endswith(".tar"):
        paths = [str(where)] if isinstance(where, str | Path) else [str(p) for p in where]
        if not paths:
            raise ConfigError("no shards were given")
        return paths, {place: Folder.at(place) for place in dict.fromkeys(map(folder_of, paths))}
    folder = Folder.at(folder_of(store.join(where, CARD)))
    names = [n for n in sorted(folder.names) if n.endswith(".tar") and not n.startswith(".")]
    if not folder.names:  # a server that lists nothing may still have a card
        names = sorted(folder.stated)
    elif complete and (missing := folder.missing()):
        raise ShardError(
            f"{CARD} lists it, and it is not here ({len(missing)} missing); {KEEP}",
            shard=store.join(where, missing[0]),
        )
    if not names:
        raise ConfigError(f"{where}: no .tar shards here; make some with `terrella shards make`")
    return [store.join(where, n) for n in names], {folder.path: folder}
