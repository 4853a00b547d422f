"""Random access to the samples of a folder of shards: mapped, checked, decoded."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ...core.errors import ConfigError
from .. import codecs
from ..errors import ShardError
from ..schema import KINDS
from . import store
from .card import check_shards, open_index
from .index import ShardIndex, index_path, read_header

QUARANTINE = "quarantine.json"
_sum = xxhash.xxh3_64_intdigest


class Shard:
    """One open shard."""

    def __init__(
        self,
        path: str,
        *,
        check: bool = True,
        decode: bool = True,
        fields: Sequence[str] | None = None,
        aside: frozenset[str] = frozenset(),
    ) -> None:
        self.path, self.check, self.aside = path, check, aside
        self.data = store.view(path)
        self.index: ShardIndex = open_index(path, self.data)
        index = self.index
        if index.tar_bytes != len(self.data):
            self._torn()
        if index.xxh3_M is None:
            self.check = False
        self.keys = index.keys
        plain: Callable[[memoryview], Any] = bytes
        self._fields = [(f, codecs.decoder(f) if decode else plain) for f in index.fields]
        self._first = index.first_S1.tolist()
        self._members = list(
            zip(
                index.field_M.tolist(),
                index.offset_M.tolist(),
                (index.offset_M + index.size_M).tolist(),
                [0] * len(index.field_M) if index.xxh3_M is None else index.xxh3_M.tolist(),
                strict=True,
            )
        )
        if fields is not None:
            self._choose(fields)
        self._require(fields)

    def __len__(self) -> int:
        return len(self.keys)

    def sample(self, i: int) -> dict[str, Any]:
        """A decoded sample: its fields, and its key under "__key__"."""
        data, check = self.data, self.check
        out: dict[str, Any] = {"__key__": self.keys[i]}
        for field, start, stop, stated in self._members[self._first[i] : self._first[i + 1]]:
            part = data[start:stop]
            name, decode = self._fields[field]
            if check and _sum(part) != stated:
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

    def _choose(self, fields: Sequence[str]) -> None:
        wanted = {i for i, (name, _) in enumerate(self._fields) if name in set(fields)}
        kept, first = [], [0]
        for i in range(len(self.keys)):
            kept += [m for m in self._members[self._first[i] : self._first[i + 1]] if m[0] in wanted]
            first.append(len(kept))
        self._members, self._first = kept, first

    def _require(self, fields: Sequence[str] | None) -> None:
        """No sample may lack a field that its kind, or the caller, needs."""
        needed = (
            list(fields)
            if fields is not None
            else (KINDS[self.index.kind].required if self.index.kind in KINDS else [])
        )
        if self.index.kind is not None and self.index.kind not in KINDS:
            raise ShardError(f"holds {self.index.kind} samples; this release reads {', '.join(KINDS)}", shard=self.path)
        owner_M = np.repeat(np.arange(len(self)), np.diff(self.index.first_S1.astype(np.int64)))
        for name in needed:
            have = np.zeros(len(self), bool)
            if name in self.index.fields:
                have[owner_M[self.index.field_M == self.index.fields.index(name)]] = True
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
        self.paths = find_shards(where)
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self.quarantined = 0
        counts, digest = [], xxhash.xxh3_64()
        self._kept: dict[int, np.ndarray] = {}
        self._aside = {number: aside for number, path in enumerate(self.paths) if (aside := quarantined_keys(path))}
        for number, path in enumerate(self.paths):
            if store.exists(index_path(path)):
                head = read_header(path)
                count, sums = head["samples"], head["tar_xxh3"]
            else:
                count, sums = len(self.shard(number)), self.shard(number).index.tar_xxh3 or str(store.file_size(path))
            if number in self._aside:
                aside, keys = self._aside[number], self.shard(number).keys
                self._kept[number] = np.array([i for i, k in enumerate(keys) if k not in aside], dtype=np.int64)
                self.quarantined += count - len(self._kept[number])
                count = len(self._kept[number])
            counts.append(count)
            digest.update(f"{store.base_name(path)} {count} {sums}\n".encode())
        self.counts = np.array(counts, dtype=np.int64)
        self.ends = np.cumsum(self.counts)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return int(self.ends[-1])

    def shard(self, number: int) -> Shard:
        """An open shard; the least recently used one is closed when too many are open."""
        found = self._open.get(number)
        if found is None:
            aside = self._aside.get(number, frozenset())
            found = Shard(self.paths[number], check=self.check, decode=self.decode, fields=self.fields, aside=aside)
            self._open[number] = found
            if len(self._open) > self.keep_open:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(number)
        return found

    def __getitem__(self, i: int) -> dict[str, Any]:
        number = int(np.searchsorted(self.ends, i, side="right"))
        return self.shard(number).sample(self._inside(number, i - int(self.ends[number] - self.counts[number])))

    def read_many(self, ids: np.ndarray) -> Any:
        """The samples of many ids in that order, one by one."""
        numbers = np.searchsorted(self.ends, ids, side="right")
        inside = ids - (self.ends - self.counts)[numbers]
        last, shard = -1, None
        for number, i in zip(numbers.tolist(), inside.tolist(), strict=True):
            if number != last:
                last, shard = number, self.shard(number)
            assert shard is not None
            yield shard.sample(i if number not in self._kept else self._inside(number, i))

    def _inside(self, number: int, i: int) -> int:
        kept = self._kept.get(number)
        return int(i) if kept is None else int(kept[i])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}  # a worker process maps the files itself


def find_shards(where: str | Path | Sequence[str | Path], complete: bool = True) -> list[str]:
    """Tars of a folder in name order, or the given ones. A folder must hold all that its card lists, unless that is
    not asked for.
    """
    if isinstance(where, str | Path):
        if str(where).endswith(".tar"):
            paths = [str(where)]
        else:
            names = [n for n in store.list_names(where) if n.endswith(".tar") and not n.startswith(".")]
            paths = [store.join(where, n) for n in names]
            if complete:
                check_shards(str(where), names)
            if not paths:
                raise ConfigError(f"{where}: no .tar shards here; make some with `terrella shards make`")
    else:
        paths = [str(p) for p in where]
    if not paths:
        raise ConfigError("no shards were given")
    return paths


def quarantined_keys(path: str) -> frozenset[str]:
    """Keys of a shard that quarantine.json sets aside."""
    beside = path[: -len(store.base_name(path))] + QUARANTINE
    if not store.exists(beside):
        return frozenset()
    try:
        entries = json.loads(store.read_bytes(beside))["samples"]
        return frozenset(str(entry["sample"]) for entry in entries if entry["shard"] == store.base_name(path))
    except (ValueError, KeyError, TypeError) as error:
        raise ShardError(
            f"not a list of samples set aside ({error}); delete it and run `terrella shards verify`", shard=beside
        ) from error
