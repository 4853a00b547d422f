"""The journal: each prompt's life, so that a killed run loses nothing and trains nothing twice.

Two kinds of file under one folder. `events-RANK.jsonl` holds what happened to prompts, step by step: issued, trained, saved (in a
checkpoint). `samples-VERSION-RANK.jsonl` holds every continuation the sampler finished, under its key. After a kill the run goes on
from the last checkpoint: later events are cut away, and what was already sampled by the very weights now asked for is not sampled
again. The same files replay a run. Importable without torch.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from ..core.errors import ConfigError
from ..core.files import make_folder, storage_errors, write_atomic
from ..data.trajectory import Invalid
from .rollout.sampler import Sample, Sampler, SampleRequest

Event = Literal["issued", "trained", "saved"]
SAMPLES = re.compile(r"samples-(\d+)-(\d+)\.jsonl")


class Journal:
    """The record of one stage. Every rank writes what befell its own prompts; reading puts all ranks together."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder, self.rank = make_folder(Path(folder)), rank
        self.events_file = self.folder / f"events-{rank}.jsonl"

    def note(self, event: Event, step: int, prompts: Iterable[int] = ()) -> None:
        """Append one event and force it to disk."""
        _append(self.events_file, [{"event": event, "step": step, "prompts": list(prompts)}])

    def resume(self, step: int) -> None:
        """Go on after a checkpoint of `step` finished steps: what was trained beyond it is as if it had not happened."""
        kept = [e for e in _lines(self.events_file) if e["step"] < step or (e["event"] == "saved" and e["step"] <= step)]
        write_atomic(self.events_file, "".join(json.dumps(e) + "\n" for e in kept))

    def events(self) -> list[dict[str, Any]]:
        """All whole events of all ranks; a line torn by a kill is passed over."""
        return [event for path in sorted(self.folder.glob("events-*.jsonl")) for event in _lines(path)]

    def trained(self) -> Counter[int]:
        """How often each prompt was trained on, as far as the journal goes."""
        return Counter(p for e in self.events() if e["event"] == "trained" for p in e["prompts"])

    def add(self, requests: Iterable[SampleRequest], samples: Iterable[Sample]) -> None:
        """Keep finished continuations."""
        by_version: dict[int, list[dict[str, Any]]] = {}
        for request, s in zip(requests, samples, strict=True):
            row = {"key": list(request.key), "ids": list(s.ids), "logprobs": list(s.logprobs), "finish": s.finish}
            row |= {"forced": [i for i, given in enumerate(s.given) if given]} if s.forced is not None else {}
            by_version.setdefault(s.weight_version, []).append(row)
        for version, rows in by_version.items():
            _append(self.folder / f"samples-{version:08d}-{self.rank}.jsonl", rows)

    def samples(self, oldest: int = 0) -> dict[tuple[int, ...], Sample]:
        """Everything that versions from `oldest` on sampled, by key; of one key asked twice the newest version stays."""
        found: dict[tuple[int, ...], Sample] = {}
        for path in sorted(self.folder.glob("samples-*.jsonl")):
            match = SAMPLES.fullmatch(path.name)
            if match is None or int(match[1]) < oldest:
                continue
            for row in _lines(path):
                forced = None
                if "forced" in row:
                    places = set(row["forced"])
                    forced = tuple(i in places for i in range(len(row["ids"])))
                found[tuple(row["key"])] = Sample(tuple(row["ids"]), tuple(row["logprobs"]), row["finish"], int(match[1]), forced)
        return found

    def prune(self, oldest: int) -> None:
        """Forget samples of versions before `oldest`: no checkpoint will ask for them again."""
        for path in self.folder.glob(f"samples-*-{self.rank}.jsonl"):
            if (match := SAMPLES.fullmatch(path.name)) and int(match[1]) < oldest:
                path.unlink(missing_ok=True)


class JournalSampler:
    """A sampler that keeps what it samples, and does not sample again what a killed run had already finished."""

    def __init__(self, inner: Sampler, journal: Journal, version: Callable[[], int], *, staleness: int = 0) -> None:
        self.inner, self.journal, self.version, self.staleness = inner, journal, version, staleness
        self.saved = journal.samples(version() - staleness)
        self.reused = 0

    def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]:
        """Saved answers where the weights allow it, fresh ones for the rest."""
        now = self.version()
        results: list[Sample | Invalid | None] = []
        for request in requests:
            saved = self.saved.pop(request.key, None)  # a key is asked once
            fits = saved is not None and now - self.staleness <= saved.weight_version <= now
            results.append(saved if fits else None)
        missing = [i for i, r in enumerate(results) if r is None]
        self.reused += len(requests) - len(missing)
        if missing:
            fresh = self.inner.generate([requests[i] for i in missing])
            good = [(requests[i], s) for i, s in zip(missing, fresh, strict=True) if not isinstance(s, Invalid)]
            self.journal.add([r for r, _ in good], [s for _, s in good])
            for i, sample in zip(missing, fresh, strict=True):
                results[i] = sample
        return [r for r in results if r is not None]


class ReplaySampler:
    """Answers from a finished run's journal alone: the same rollouts again, without any model."""

    def __init__(self, folder: Path) -> None:
        if not Path(folder).is_dir():
            raise ConfigError(f"{folder}: no journal to replay; give a run whose stage kept one")
        self.folder, self.saved = Path(folder), Journal(folder).samples()

    def generate(self, requests: list[SampleRequest]) -> list[Sample | Invalid]:
        """The saved continuation of every key; a key that was never sampled means that settings differ from the run's."""
        for request in requests:
            if request.key not in self.saved:
                raise ConfigError(
                    f"{self.folder}: holds no sample of key {request.key}; a replay needs the run's own settings and keep_samples"
                )
        return [self.saved[r.key] for r in requests]


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with storage_errors(path), open(path, "a+b") as stream:
        stream.seek(0, os.SEEK_END)
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            torn = stream.read(1) != b"\n"
            if torn:  # a kill cut the last line short; ours must not grow onto it
                stream.write(b"\n")
        stream.write(text.encode())
        stream.flush()
        os.fsync(stream.fileno())


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            row = json.loads(line) if line else None
        except json.JSONDecodeError:
            continue
        if row is not None:
            yield row
