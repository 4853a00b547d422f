"""Verifying a folder of shards, setting bad samples aside, and saying what is in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from .. import codecs
from ..errors import ShardError
from ..schema import KINDS, check_sample
from . import store
from .card import CARD, QUARANTINE, Folder, folder_of, open_index
from .dataset import find_shards, lost_members
from .index import ShardIndex


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong; without a sample the whole shard is meant."""

    shard: str
    sample: str | None
    field: str | None
    reason: str

    def __str__(self) -> str:
        return str(ShardError(self.reason, shard=self.shard, sample=self.sample, field=self.field))


@dataclass
class Verification:
    """What was looked at and what was found."""

    shards: int = 0
    samples: int = 0
    already_aside: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def bad_samples(self) -> set[tuple[str, str]]:
        return {(p.shard, p.sample) for p in self.problems if p.sample is not None}

    @property
    def bad_shards(self) -> set[str]:
        return {p.shard for p in self.problems if p.sample is None}


def verify(
    where: str | Path, *, quarantine: bool = False, tell: Callable[[int, int], None] | None = None
) -> Verification:
    """Read everything: sizes, checksums, every member, the kind's schema, keys that occur twice.

    With `quarantine` bad samples are added to quarantine.json beside the shards, and readers pass over them from then
    on. Damage to a shard as a whole (no tar, a foreign index) cannot be set aside sample by sample and stays a problem.
    """
    report = Verification()
    paths, folders = find_shards(where, complete=False)
    if not str(where).endswith(".tar"):
        for name in folders[folder_of(paths[0])].missing():
            report.problems.append(Problem(name, None, None, f"{CARD} lists it, and it is not here"))
    owners: dict[str, str] = {}
    for number, path in enumerate(paths):
        report.shards += 1
        try:
            _verify_shard(path, folders[folder_of(path)], report, owners)
        except ShardError as error:
            report.problems.append(Problem(store.base_name(path), None, None, error.reason))
        if tell is not None:
            tell(number + 1, len(paths))
    if quarantine and report.bad_samples:
        _set_aside(paths, report)
    return report


def _verify_shard(path: str, folder: Folder, found: Verification, owners: dict[str, str]) -> None:
    name = store.base_name(path)
    data = store.view(path, ahead=store.BLOCK)
    index = open_index(path, data, folder)
    summed = index.xxh3_M is not None
    aside = folder.aside.get(name, frozenset())
    kind = None
    if index.kind is not None:
        if index.kind not in KINDS:
            raise ShardError(f"holds {index.kind} samples; this release reads {', '.join(KINDS)}", shard=name)
        kind = KINDS[index.kind]
    lost = dict(lost_members(index, len(data)))
    for key, member in lost.items():
        if key not in aside:
            found.problems.append(
                Problem(name, key, member, f"the tar ends before it ({len(data)} bytes, {index.tar_bytes} written)")
            )
    before = len(found.problems)
    for i, key in enumerate(index.keys):
        if key in aside:
            found.already_aside += 1
            continue
        found.samples += 1
        if key in owners:
            found.problems.append(Problem(name, key, None, f"the key occurs twice, also in {owners[key]}"))
        owners[key] = name
        if key in lost:
            continue
        sample = {}
        try:
            for member, value in _members(index, data, i, name):
                sample[member] = value
            if kind is not None:
                check_sample(kind, sample, shard=name, key=key)
        except ShardError as error:
            found.problems.append(Problem(name, key, error.field, error.reason))
    untouched = not lost and len(found.problems) == before and not aside
    if summed and untouched and store.checksum(data) != index.tar_xxh3:
        raise ShardError(
            "every member is whole but the tar's checksum differs: a header or the padding changed", shard=name
        )


def _members(index: ShardIndex, data: store.Bytes, i: int, shard: str) -> Iterator[tuple[str, Any]]:
    for m in range(int(index.first_S1[i]), int(index.first_S1[i + 1])):
        member = index.fields[int(index.field_M[m])]
        part = data[int(index.offset_M[m]) : int(index.offset_M[m]) + int(index.size_M[m])]
        if index.xxh3_M is not None and xxhash.xxh3_64_intdigest(part) != int(index.xxh3_M[m]):
            raise ShardError(
                "checksum differs from when it was written", shard=shard, sample=index.keys[i], field=member
            )
        try:
            yield member, codecs.decoder(member)(part)
        except Exception as error:
            raise ShardError(f"cannot be decoded: {error}", shard=shard, sample=index.keys[i], field=member) from error


def _set_aside(paths: list[str], found: Verification) -> None:
    by_name = {store.base_name(p): p for p in paths}
    first: dict[tuple[str, str], Problem] = {}
    for problem in found.problems:
        if problem.sample is not None:
            first.setdefault((problem.shard, problem.sample), problem)
    folders: dict[str, list[Problem]] = {}
    for (shard, _), problem in first.items():
        folders.setdefault(by_name[shard][: -len(shard)], []).append(problem)
    for folder, problems in folders.items():
        target = folder + QUARANTINE
        old = codecs.decode_json(store.read_bytes(target))["samples"] if store.exists(target) else []
        new = [{"shard": p.shard, "sample": p.sample, "field": p.field, "reason": p.reason} for p in problems]
        store.write_bytes(target, codecs.encode_json({"terrella_quarantine": 1, "samples": old + new}) + b"\n")


def statistics(where: str | Path) -> dict[str, Any]:
    """Counts and sizes from the indexes alone, without reading a sample."""
    members: dict[str, list[np.ndarray]] = {}
    kinds: dict[str, int] = {}
    samples = total = aside = 0
    paths, folders = find_shards(where)
    for path in paths:
        folder = folders[folder_of(path)]
        index = open_index(path, store.view(path), folder)
        samples += len(index)
        total += index.tar_bytes
        aside += len(folder.aside.get(store.base_name(path), ()))
        kinds[index.kind or "not stated"] = kinds.get(index.kind or "not stated", 0) + len(index)
        for number, name in enumerate(index.fields):
            members.setdefault(name, []).append(index.size_M[index.field_M == number])
    fields = {}
    for name, parts in members.items():
        sizes = np.concatenate(parts)
        quantiles = np.quantile(sizes, [0.05, 0.5, 0.95]).round().astype(int).tolist()
        fields[name] = {
            "count": len(sizes),
            "bytes": int(sizes.sum()),
            "p05": quantiles[0],
            "median": quantiles[1],
            "p95": quantiles[2],
        }
    return {
        "shards": len(paths),
        "samples": samples,
        "bytes": total,
        "quarantined": aside,
        "kinds": kinds,
        "fields": fields,
    }
