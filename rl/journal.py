"""The journal: the life of each prompt, so that a killed run loses nothing and trains nothing twice.

A folder holds two kinds of file. `events-RANK.jsonl` has what happened to prompts, step by step: issued, trained, saved
(in a checkpoint). `samples-VERSION-RANK.jsonl` has every finished continuation, with its key and a fingerprint of its
context; VERSION is the newest weights that sampled it. Every line has a checksum. After a kill the run continues from
the last checkpoint: later events are cut off, and what the same weights have already sampled is not sampled again. The
same files replay a run. Importable without torch.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import shutil
import threading
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import xxhash

from ..core.errors import ConfigError, NumericsError, StorageError
from ..core.files import make_folder, storage_errors, write_atomic
from ..data.trajectory import Invalid, Routing
from .rollout.sampler import Sample, Sampler, SampleRequest
from .rollout.stream import Stream

Event = Literal["issued", "trained", "saved"]
HIGHEST_LOGPROB = 1e-4  # a log-prob above 0 only by rounding
SAMPLES = re.compile(r"samples-(\d+)-(\d+)\.jsonl")
Asked = tuple[
    tuple[int, ...], str
]  # a request's key and the fingerprint of its context, "" in rows of earlier releases


class Journal:
    """The journal of one stage. Every rank writes the events of its own prompts; reading merges all ranks."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder, self.rank = make_folder(Path(folder)), rank
        self.events_file = self.folder / f"events-{rank}.jsonl"
        self._lock = threading.Lock()  # rollouts ahead write while earlier ones are trained on

    def note(self, event: Event, step: int, prompts: Iterable[int] = ()) -> None:
        """Append one event and force it to disk."""
        with self._lock:
            _append(self.events_file, [{"event": event, "step": step, "prompts": list(prompts)}])

    def resume(self, step: int, newest: int | None = None) -> list[str]:
        """Continue after a checkpoint of `step` finished steps: drop the events beyond it. With `newest`, also drop
        samples of later versions, whose weights will not be reproduced.

        Returns what is damaged in this rank's files, by file and line; those lines are dropped, and their samples are
        drawn again.
        """
        events, problems = _repair(self.events_file)
        kept = [e for e in events if e["step"] < step or (e["event"] == "saved" and e["step"] <= step)]
        write_atomic(self.events_file, "".join(map(_line, kept)))
        for path in sorted(self.folder.glob(f"samples-*-{self.rank}.jsonl")):
            match = SAMPLES.fullmatch(path.name)
            if newest is not None and match and int(match[1]) > newest:
                path.unlink()
            else:
                problems += _repair(path)[1]
        return problems

    def ranks(self) -> set[int]:
        """The data ranks that have written here, now or in earlier starts."""
        return {int(path.stem.rpartition("-")[2]) for path in self.folder.glob("events-*.jsonl")}

    def events(self) -> list[dict[str, Any]]:
        """All undamaged events of all ranks; `resume` reports the others."""
        return [event for path in sorted(self.folder.glob("events-*.jsonl")) for event in _read(path)[0]]

    def trained(self) -> Counter[int]:
        """How often each prompt was trained on."""
        return Counter(p for e in self.events() if e["event"] == "trained" for p in e["prompts"])

    def add(self, requests: Iterable[SampleRequest], samples: Iterable[Sample]) -> None:
        """Append finished continuations."""
        by_version: dict[int, list[dict[str, Any]]] = {}
        for request, s in zip(requests, samples, strict=True):
            if not all(p <= HIGHEST_LOGPROB for p in s.logprobs):
                raise NumericsError(
                    f"sample {request.key}: the sampler gave a log-prob of {max(s.logprobs)}; no log-prob is above 0"
                )
            row = {"key": list(request.key), "ids": list(s.ids), "logprobs": list(s.logprobs), "finish": s.finish}
            row |= {"forced": [i for i, given in enumerate(s.given) if given]} if s.forced is not None else {}
            row |= {"versions": [[v, len([*run])] for v, run in groupby(s.versions)]} if s.versions else {}
            row |= {"experts": _packed(s.experts)} if s.experts else {}
            row["context"] = _asked(request)[1]
            by_version.setdefault(max(s.versions or (s.weight_version,)), []).append(row)
        with self._lock:
            for version, rows in by_version.items():
                _append(self.folder / f"samples-{version:08d}-{self.rank}.jsonl", rows)

    def samples(self, oldest: int = 0, *, strict: bool = False) -> dict[Asked, Sample]:
        """Everything sampled by versions from `oldest` on; for a request that was sampled twice, the newest version.

        Damaged lines are skipped (`resume` reports them), or an error with `strict`.
        """
        found: dict[Asked, Sample] = {}
        for path in sorted(self.folder.glob("samples-*.jsonl")):
            match = SAMPLES.fullmatch(path.name)
            if match is None or int(match[1]) < oldest:
                continue
            rows, problems = _read(path)
            if strict and problems:
                raise StorageError(f"{problems[0]}; restore the file, or train without --replay")
            for row in rows:
                forced = None
                if "forced" in row:
                    places = set(row["forced"])
                    forced = tuple(i in places for i in range(len(row["ids"])))
                versions = tuple(v for v, count in row.get("versions", ()) for _ in range(count)) or None
                found[tuple(row["key"]), row.get("context", "")] = Sample(
                    tuple(row["ids"]),
                    tuple(row["logprobs"]),
                    row["finish"],
                    min(versions or (int(match[1]),)),
                    forced,
                    versions,
                    _unpacked(row["experts"]) if "experts" in row else None,
                )
        return found

    def prune(self, oldest: int) -> None:
        """Delete samples of versions before `oldest`, which no resume will need."""
        for path in self.folder.glob(f"samples-*-{self.rank}.jsonl"):
            if (match := SAMPLES.fullmatch(path.name)) and int(match[1]) < oldest:
                path.unlink(missing_ok=True)


class JournalSampler:
    """Records what the inner sampler samples, and does not repeat what a killed run had already finished."""

    def __init__(self, inner: Sampler, journal: Journal, version: Callable[[], int], *, staleness: int = 0) -> None:
        self.inner, self.journal, self.version, self.staleness = inner, journal, version, staleness
        self.saved = journal.samples(version() - staleness)
        self.reused = 0

    def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]:
        """Saved answers if the whole call was saved by matching weights, else fresh ones.

        A call is never answered in part: the remaining requests would make a smaller batch, whose log-probs round
        differently.
        """
        reused = [s for s in map(self._saved, requests) if s is not None]
        if len(reused) == len(requests):
            self.reused += len(reused)
            return list(reused)
        fresh = self.inner.generate(requests)
        good = [(request, s) for request, s in zip(requests, fresh, strict=True) if not isinstance(s, Invalid)]
        self.journal.add([request for request, _ in good], [s for _, s in good])
        return fresh

    def recall(self) -> None:
        """Load the journal again, so that a repeated step does not resample what was saved."""
        self.saved = self.journal.samples(self.version() - self.staleness)

    def _saved(self, request: SampleRequest) -> Sample | None:
        """Take what matching weights sampled for a request; each entry is used once."""
        found, now = _pop(self.saved, request), self.version()
        if found is None or not now - self.staleness <= found.weight_version:
            return None
        return found if max(found.versions or (found.weight_version,)) <= now else None


class JournalStream(JournalSampler):
    """The same over a stream: each request is answered on its own, from the journal or by the sampler."""

    def __init__(self, inner: Stream, journal: Journal, version: Callable[[], int], *, staleness: int = 0) -> None:
        super().__init__(inner, journal, version, staleness=staleness)
        self.stream = inner
        self.lengths: dict[int, Counter[int]] = defaultdict(Counter)  # sampled spans, by the seed of their keys
        self._lock = threading.Lock()

    def submit(self, request: SampleRequest) -> Future[Sample | Invalid]:
        """Ask for a continuation; it is written to the journal before the future is set."""
        with self._lock:
            saved = self._saved(request)
            if saved is not None:
                self.reused += 1
                self._count([(request, saved)])
        if saved is None:
            return self.stream.submit(request, self._note)
        answer: Future[Sample | Invalid] = Future()
        answer.set_result(saved)
        return answer

    def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]:
        return [answer.result() for answer in [self.submit(request) for request in requests]]

    def _note(self, pairs: list[tuple[SampleRequest, Sample]]) -> None:
        self.journal.add([request for request, _ in pairs], [sample for _, sample in pairs])
        with self._lock:
            self._count(pairs)

    def _count(self, pairs: list[tuple[SampleRequest, Sample]]) -> None:
        for request, sample in pairs:
            self.lengths[request.key[0]].update(len([*run]) for given, run in groupby(sample.given) if not given)


class ReplaySampler:
    """Answers from a finished run's journal alone: the same rollouts without a model; with `routing` they include the
    chosen experts.
    """

    def __init__(self, folder: Path, routing: bool = True) -> None:
        if not Path(folder).is_dir():
            raise ConfigError(f"{folder}: no journal to replay; give a run whose stage kept one")
        self.folder, self.saved = Path(folder), Journal(folder).samples(strict=True)
        if not routing:
            self.saved = {asked: replace(sample, experts=None) for asked, sample in self.saved.items()}

    def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]:
        """The saved continuation of every key; a missing key means that settings differ from the run's."""
        found = [self.saved.get(_asked(r), self.saved.get((r.key, ""))) for r in requests]
        for request, sample in zip(requests, found, strict=True):
            if sample is None:
                raise ConfigError(
                    f"{self.folder}: holds no sample of key {request.key} after this context; a replay needs the run's "
                    "own settings and keep_samples"
                )
        return [sample for sample in found if sample is not None]


def _packed(experts: Routing) -> list[Any]:
    """Choices of experts as a row keeps them: layers, experts of a token, and the numbers, compressed."""
    return [experts.layers, experts.each, base64.b64encode(zlib.compress(experts.data, 1)).decode()]


def _unpacked(kept: list[Any]) -> Routing:
    return Routing(kept[0], kept[1], zlib.decompress(base64.b64decode(kept[2])))


def _asked(request: SampleRequest) -> Asked:
    return request.key, _sum(",".join(map(str, request.ids)))


def _pop(saved: dict[Asked, Sample], request: SampleRequest) -> Sample | None:
    found = saved.pop(_asked(request), None)
    return saved.pop((request.key, ""), None) if found is None else found


def _repair(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Like `_read`, but removes damaged lines from the file; the damaged file is kept under another name."""
    rows, problems = _read(path)
    if problems:
        with storage_errors(path):
            shutil.copyfile(path, path.with_name(f"{path.name}.damaged"))
        write_atomic(path, "".join(map(_line, rows)))
    return rows, problems


def _line(row: dict[str, Any]) -> str:
    """A row as it is written: its last key is a checksum of the text without it."""
    text = json.dumps(row)
    return f'{text[:-1]}, "sum": "{_sum(text)}"}}\n'


def _sum(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    text = "".join(map(_line, rows))
    with storage_errors(path), open(path, "a+b") as stream:
        if stream.seek(0, os.SEEK_END):
            stream.seek(-1, os.SEEK_END)
            if stream.read(1) != b"\n":  # a kill cut the last line short; ours must not be appended to it
                stream.seek(0)
                stream.truncate(stream.read().rfind(b"\n") + 1)
        stream.write(text.encode())
        stream.flush()
        os.fsync(stream.fileno())


def _read(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The valid rows of a file, and what is wrong with the others, by file and line. A last line without a line end was
    torn by a kill.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], []
    rows, problems = [], []
    for number, line in enumerate(lines[:-1], 1):
        try:
            rows.append(_row(line.decode(), path.name.startswith("samples")))
        except (ValueError, TypeError, RecursionError) as error:
            problems.append(f"{path}:{number}: damaged ({error})")
    return rows, problems


def _row(text: str, is_sample: bool) -> dict[str, Any]:
    """One line, checked; a row of an earlier release has no checksum. Raises ValueError or TypeError."""
    row = json.loads(text)
    if not isinstance(row, dict):
        raise ValueError("not an object")
    if "sum" in row and row.pop("sum") != _sum(text[: text.rindex(", ")] + "}"):
        raise ValueError("its checksum does not match")
    wanted = {"key", "ids", "logprobs", "finish"} if is_sample else {"event", "step", "prompts"}
    if row.keys() - ({"forced", "versions", "experts", "context"} if is_sample else set()) != wanted:
        raise ValueError(f"its keys are {', '.join(row)}")
    numbers = [*row["key"], *row["ids"], *row.get("forced", ())] if is_sample else [row["step"], *row["prompts"]]
    if not all(isinstance(n, int) for n in numbers):
        raise ValueError("not whole numbers")
    if is_sample:
        if len(row["ids"]) != len(row["logprobs"]):
            raise ValueError(f"{len(row['ids'])} tokens with {len(row['logprobs'])} log-probs")
        if not all(-math.inf < p <= HIGHEST_LOGPROB for p in row["logprobs"]):
            raise ValueError("a log-prob that cannot be")
        if "versions" in row and sum(count for _, count in row["versions"]) != len(row["ids"]):
            raise ValueError("not one version for every token")
    return row
