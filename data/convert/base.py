"""Shared by all converters: items, the report of dropped records, resuming, and the dry run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ..codecs import decoder, encode_json
from ..errors import ShardError
from ..schema import KINDS, PAIR, TASK, TEXT, VIDEO, check_sample
from ..shards import store
from ..shards.writer import ShardWriter, encode_sample, ordered_map

REPORT = "report.json"
EXAMPLES = 3  # of each reason to drop


@dataclass(frozen=True)
class Item:
    """A record of the source: a sample, or why it was dropped. `cursor` is where to continue after it."""

    cursor: Any
    sample: dict[str, Any] | None = None
    key: str | None = None
    dropped: str | None = None
    where: str = ""
    done: float = 0.0  # share of the source read so far


Read = Callable[..., Iterator[Item]]


@dataclass(frozen=True)
class Converter:
    """A named converter; `module:function` is imported when it is used."""

    kind: str | None  # None: samples of any kind, or of the one that the option `kind` names
    target: str
    about: str
    options: tuple[str, ...] = ()
    urls: bool = False  # whether its source may be something other than a path

    def read(self) -> Read:
        module, _, function = self.target.partition(":")
        return getattr(importlib.import_module(f".{module}", __package__), function)


CONVERTERS: dict[str, Converter] = {
    "text-game": Converter(
        PAIR,
        "text_game:read",
        "GPT-simulator JSONL or zip, or a checkout's data folder",
        ("which", "rules", "examples", "split", "prompt"),
    ),
    "text-game-crawl": Converter(
        PAIR,
        "crawl:read",
        "transitions rebuilt by running the games of a GPT-simulator checkout",
        ("which", "rules", "examples", "games"),
    ),
    "rlvr-parquet": Converter(PAIR, "parquet:read_rlvr", "RLVR-World parquet: text game and web page"),
    "web-tasks": Converter(TASK, "web_tasks:read", "WebArena task configurations"),
    "webrl": Converter(TEXT, "webrl:read", "WebRL traces and actions, one sample a step", ("replay",)),
    "sharegpt": Converter(TEXT, "chat:read_sharegpt", "LLaMA-Factory sharegpt JSON"),
    "chat": Converter(TEXT, "chat:read_jsonl", "JSONL with messages"),
    "hf": Converter(TEXT, "parquet:read_hf", "a Hugging Face datasets folder (parquet or arrow) of chats"),
    "npz": Converter(VIDEO, "npz:read", "npz episodes: image, action", ("split", "frames")),
    "rt1": Converter(VIDEO, "rt1:read", "RT-1 episodes in TFRecord (RLDS), read without TensorFlow", ("image",)),
    "webdataset": Converter(
        None,
        "foreign:read",
        "shards of other programs: paths or URLs with braces, pipe: commands, gz",
        ("kind", "keys"),
        urls=True,
    ),
}


@dataclass
class ConvertReport:
    """What a conversion read, wrote and dropped."""

    converter: str
    source: str
    options: dict[str, str] = field(default_factory=dict)
    read: int = 0
    written: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)  # dropped records, by reason
    counts: dict[str, int] = field(default_factory=dict)  # of properties of the samples, by name

    def drop(self, reason: str, where: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        if len(self.examples.setdefault(reason, [])) < EXAMPLES:
            self.examples[reason].append(where)


def convert(
    name: str,
    source: str | Path,
    out: str | Path | None,
    *,
    resume: bool = False,
    max_bytes: int = 256 << 20,
    limit: int | None = None,
    workers: int = 0,
    tell: Callable[[float, ConvertReport], None] | None = None,
    **options: Any,
) -> ConvertReport:
    """Run a converter; with `out` None it is a dry run, which reads and checks everything and writes nothing.

    Samples are checked and encoded in `workers` processes; the shards are the same for any number of them. The cursor
    and the report so far are kept in each shard's index, so a killed conversion resumes to the same shards and report.
    """
    if name not in CONVERTERS:
        raise ConfigError(f"unknown converter {name!r}, expected one of {', '.join(CONVERTERS)}")
    chosen = CONVERTERS[name]
    unknown = sorted(set(options) - set(chosen.options))
    if unknown:
        raise ConfigError(
            f"converter {name} has no option {unknown[0]!r}; it has {', '.join(chosen.options) or 'none'}"
        )
    kind = chosen.kind or options.pop("kind", None)
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"-o kind={kind}: expected one of {', '.join(KINDS)}")
    report = ConvertReport(name, Path(source).name, {key: str(value) for key, value in options.items()})
    if not chosen.urls and not Path(source).exists():
        raise ConfigError(f"{source}: not there")
    writer = None if out is None else ShardWriter(out, kind=kind, max_bytes=max_bytes, resume=resume, check=False)
    cursor = None
    if writer is not None and writer.cursor is not None:
        cursor, report = writer.cursor["at"], _begun(report, writer.cursor["report"], str(out))
    items = chosen.read()(source if chosen.urls else Path(source), cursor, **options)
    if limit is not None:
        items = islice(items, max(0, limit - report.read))
    try:
        for item, members, problem in ordered_map(partial(_prepare, kind, chosen.kind is None), items, workers):
            report.read += 1
            _account(item, members, problem, writer, report)
            if tell is not None:
                tell(item.done, report)
        if report.read == 0 and limit != 0:
            raise ConfigError(f"{source}: holds no records that {name} reads")
    except BaseException:
        if writer is not None:
            writer.abort()
        raise
    if writer is not None:
        writer.close()
        store.write_bytes(store.join(out or ".", REPORT), encode_json(report.__dict__) + b"\n")
    return report


def _begun(now: ConvertReport, stored: dict[str, Any], out: str) -> ConvertReport:
    """The report of a conversion to resume. Its cursor is a place in one source, and meaningless in another."""
    for key in ("converter", "source", "options"):
        before = stored.get(key, getattr(now, key))  # earlier releases kept no options
        if before != getattr(now, key):
            raise ConfigError(
                f"{out}: was started with {key} {before!r}, not {getattr(now, key)!r}; resume with the same, or choose "
                "an empty folder"
            )
    return ConvertReport(**stored)


Prepared = tuple[Item, list[tuple[str, bytes]], str | None]


def _prepare(kind: str | None, as_bytes: bool, item: Item) -> Prepared:
    """Check and encode a sample, in a worker process; only the bytes are returned. Samples given `as_bytes` are decoded
    to be checked, and their bytes kept.
    """
    bare = replace(item, sample=None)
    if item.sample is None:
        return bare, [], item.dropped or "no reason given"
    if kind is None:
        return replace(bare, sample={}), encode_sample(item.sample), None
    try:
        values = {name: _decoded(name, v) for name, v in item.sample.items()} if as_bytes else item.sample
        check_sample(KINDS[kind], values, shard="", key=item.key or "")
        flags = {
            name: True for part in ("extra.json", "meta.json") for name, v in values.get(part, {}).items() if v is True
        }
        return replace(bare, sample=flags), encode_sample(item.sample), None
    except (ShardError, ValueError) as error:
        said = f"{getattr(error, 'field', None) or ''} {getattr(error, 'reason', error)}"
        return replace(bare, where=f"{item.where}: {said}"), [], "does not fit the schema"


def _decoded(name: str, data: bytes) -> Any:
    try:
        return decoder(name)(memoryview(data))
    except Exception as error:  # bytes may be anything
        raise ValueError(f"{name} cannot be decoded: {error}") from error


def _account(
    item: Item, members: list[tuple[str, bytes]], problem: str | None, writer: ShardWriter | None, report: ConvertReport
) -> None:
    if problem is not None:
        report.drop(problem, item.where)
        return
    key = item.key if item.key is not None else f"{report.written:09d}"
    report.written += 1
    for flag in item.sample or {}:
        report.counts[flag] = report.counts.get(flag, 0) + 1
    if writer is not None:
        # copy the report: a shard's cursor must record the state at its last sample
        counts = {k: _copied(v) for k, v in report.__dict__.items()}
        writer.write_encoded(members, key=key, cursor={"at": item.cursor, "report": counts})


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: list(v) if isinstance(v, list) else v for k, v in value.items()}
    return value
