"""Writing shards: size-bounded, whole or absent, resumable at the exact sample, the same bytes for the same samples."""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from ...core.errors import ConfigError, DeadlineError, StorageError
from ...core.process import die_with_parent
from .. import codecs
from ..errors import ShardError
from ..schema import KINDS, Kind, check_sample
from . import store
from .card import write_card
from .index import ShardIndex, index_path, load_index
from .tar import END, padding, split_name, tar_header

DEADLINE_S = 600.0  # for one chunk of samples to be encoded
T = TypeVar("T")
R = TypeVar("R")


class ShardWriter:
    """Writes samples (dicts of field -> value) into `folder` as PREFIX-000000.tar and so on, an index beside each.

    A killed writer leaves whole shards only. With `resume` it goes on after them: `samples` says how many samples are
    already there and `cursor` what was last given with one, so that the source can be put where it stood. Writers with
    different prefixes may fill one folder at the same time.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        kind: str | None = None,
        prefix: str = "shard",
        max_bytes: int = 256 << 20,
        max_samples: int = 100_000,
        resume: bool = False,
        check: bool = True,
    ) -> None:
        if kind is not None and kind not in KINDS:
            raise ConfigError(f"unknown kind {kind!r}, expected one of {', '.join(KINDS)}")
        self.folder, self.prefix, self.max_bytes, self.max_samples = str(folder), prefix, max_bytes, max_samples
        self.kind: Kind | None = KINDS[kind] if kind else None
        self.check = check
        self.samples = 0
        self.cursor: Any = None
        self.shards: list[str] = []
        self._keys_seen: set[str] = set()
        self._open: _OpenShard | None = None
        store.make_folder(self.folder)
        self._clean_and_count(resume)

    def _clean_and_count(self, resume: bool) -> None:
        names = set(store.list_names(self.folder))
        existing = sorted(n for n in names if n.startswith(self.prefix + "-") and n.endswith(".tar"))
        if existing and not resume:
            raise ConfigError(f"{self.folder} already holds {existing[0]}; resume, or choose an empty folder")
        for name in names:
            torn = name.startswith(f".{self.prefix}-") and name.endswith(".tmp")
            orphan = (
                name.startswith(self.prefix + "-")
                and name.endswith(".index")
                and name[: -len(".index")] + ".tar" not in names
            )
            if torn or orphan:
                store.remove(store.join(self.folder, name))
        for number, name in enumerate(existing):
            if name != f"{self.prefix}-{number:06d}.tar":
                raise ShardError(
                    f"expected {self.prefix}-{number:06d}.tar here: a shard in the middle is missing", shard=name
                )
            index = load_index(store.join(self.folder, name))
            if (index.kind or None) != (self.kind.name if self.kind else None):
                raise ShardError(
                    f"holds {index.kind} samples, this writer makes {self.kind and self.kind.name}", shard=name
                )
            self.samples += len(index)
            self.cursor = index.cursor
            self._keys_seen.update(index.keys)
            self.shards.append(name)

    def write(self, sample: dict[str, Any], *, key: str | None = None, cursor: Any = None) -> str:
        """Add a sample; returns its key (by default its number). Values become bytes by the field's extension."""
        key = (
            key
            if key is not None
            else (f"{self.samples:09d}" if self.prefix == "shard" else f"{self.prefix}-{self.samples:09d}")
        )
        if self.kind is not None and self.check:
            check_sample(self.kind, sample, shard=self._next_name(), key=key)
        return self.write_encoded(encode_sample(sample), key=key, cursor=cursor)

    def write_encoded(self, members: list[tuple[str, bytes]], *, key: str, cursor: Any = None) -> str:
        """Add a sample whose members are bytes already (see encode_sample)."""
        if key in self._keys_seen:
            raise ShardError("the key was already written; keys must be unique", shard=self._next_name(), sample=key)
        if split_name(key + ".x") != (key, "x") or "\n" in key:
            raise ValueError(
                f"key {key!r} must have no dot in its last part, no line break, and not begin with two underscores"
            )
        if not members:
            raise ValueError(f"sample {key} has no fields")
        need = sum(512 + len(data) + padding(len(data)) for _, data in members)
        shard = self._open
        if shard is not None and (shard.at + need + len(END) > self.max_bytes or shard.samples >= self.max_samples):
            self._finish_shard()
        with self._storage():
            if self._open is None:
                self._open = _OpenShard(self.folder, self._next_name())
            self._open.add(key, members)
        self._keys_seen.add(key)
        self.samples += 1
        if cursor is not None:
            self.cursor = cursor
        return key

    def close(self) -> None:
        """Finish the last shard and write the dataset's card."""
        if self._open is not None:
            self._finish_shard()
        write_card(self.folder)

    def abort(self) -> None:
        """Leave whole shards only."""
        if self._open is not None:
            self._open.discard()
            self._open = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    @contextmanager
    def _storage(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = "whole shards are kept: make room, then resume"
            raise StorageError(f"{self.folder}: {error.strerror or error}; {remedy}") from error

    def _next_name(self) -> str:
        return f"{self.prefix}-{len(self.shards):06d}.tar"

    def _finish_shard(self) -> None:
        assert self._open is not None
        with self._storage():
            self._open.finish(self.kind.name if self.kind else None, self.cursor)
        self.shards.append(self._open.name)
        self._open = None


class _OpenShard:
    """A shard in the making, in a temporary file."""

    def __init__(self, folder: str, name: str) -> None:
        self.folder, self.name = folder, name
        here = Path(tempfile.mkdtemp(prefix="terrella-shards-")) if store.is_url(folder) else Path(folder)
        self.temporary = here / f".{name}.tmp"
        self.stream = open(self.temporary, "wb", buffering=1 << 20)
        self.at = self.samples = 0
        self.digest = xxhash.xxh3_64()
        self.keys: list[str] = []
        self.fields: dict[str, int] = {}
        self.first, self.rows = [], []

    def add(self, key: str, members: list[tuple[str, bytes]]) -> None:
        self.keys.append(key)
        self.first.append(len(self.rows))
        parts = []
        for field, data in members:
            at = self.at + 512
            self.rows.append(
                (self.fields.setdefault(field, len(self.fields)), at, len(data), xxhash.xxh3_64_intdigest(data))
            )
            parts += [tar_header(f"{key}.{field}", len(data)), data, bytes(padding(len(data)))]
            self.at = at + len(data) + padding(len(data))
        self._put(b"".join(parts))
        self.samples += 1

    def _put(self, data: bytes) -> None:
        self.digest.update(data)
        self.stream.write(data)

    def finish(self, kind: str | None, cursor: Any) -> None:
        self._put(END)
        self.stream.close()
        field, offset, size, sums = (np.array(c, dtype="<u8") for c in zip(*self.rows, strict=True))
        first = np.array([*self.first, len(self.rows)])
        total = self.at + len(END)
        index = ShardIndex(
            self.keys, list(self.fields), first, field, offset, size, sums, total, self.digest.hexdigest(), kind, cursor
        )
        path = store.join(self.folder, self.name)
        beside = self.temporary.with_name(f".{self.name}.index.tmp")
        beside.write_bytes(index.to_bytes())
        # the index first: a tar that is there has its index, an index alone is removed on resume
        store.commit(beside, index_path(path))
        store.commit(self.temporary, path)

    def discard(self) -> None:
        with suppress(OSError):  # a full disk does not take what is still buffered
            self.stream.close()
        self.temporary.unlink(missing_ok=True)


def encode_sample(sample: dict[str, Any]) -> list[tuple[str, bytes]]:
    """Members of a sample as bytes, in the order of its fields."""
    members = []
    for field, value in sample.items():
        encode = codecs.encoder(field)
        if isinstance(value, bytes | bytearray | memoryview):
            members.append((field, bytes(value)))
        elif encode is None:
            raise ValueError(f"field {field}: no encoder for this extension; give bytes, or use json, npy, txt or png")
        else:
            try:
                members.append((field, encode(value)))
            except (TypeError, ValueError) as error:
                raise ValueError(f"field {field}: {error}") from error
    return members


def ordered_map(function: Callable[[T], R], items: Iterable[T], workers: int, chunk: int = 8) -> Iterator[R]:
    """function(item) in `workers` processes, in the order of the items, a bounded number of them under way. 0 workers:
    right here.

    What is written from it is the same for any number of workers.
    """
    if workers == 0:
        yield from map(function, items)
        return
    source = iter(items)
    waiting: deque[Future[list[R]]] = deque()
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=die_with_parent, initargs=(os.getpid(),)
    ) as pool:
        while True:
            while len(waiting) < 4 * workers and (part := list(islice(source, chunk))):
                waiting.append(pool.submit(_apply, function, part))
            if not waiting:
                return
            try:
                done = waiting.popleft().result(timeout=DEADLINE_S)
            except TimeoutError as error:
                for process in list(pool._processes.values()):  # leaving the block waits for them
                    process.kill()
                raise DeadlineError(f"a worker did not encode {chunk} samples within {DEADLINE_S:.0f} s") from error
            yield from done


def _apply(function: Callable[[T], R], part: list[T]) -> list[R]:
    return [function(item) for item in part]
