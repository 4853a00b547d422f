"""What all converters share: items, the report of what was dropped and why, resuming, and the dry run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...core.files import write_json
from ..errors import ShardError
from ..schema import KINDS, PAIR, TASK, TEXT, VIDEO, check_sample
from ..shards.writer import ShardWriter, encode_sample

REPORT = "report.json"
EXAMPLES = 3  # of each reason to drop


@dataclass(frozen=True)
class Item:
    """One thing the source held: a sample, or why it was dropped. `cursor` is where to go on after it."""

    cursor: Any
    sample: dict[str, Any] | None = None
    key: str | None = None
    dropped: str | None = None
    where: str = ""
    done: float = 0.0  # share of the source behind it


Read = Callable[..., Iterator[Item]]


@dataclass(frozen=True)
class Converter:
    """A named converter; `module:function` is imported when it is used."""

    kind: str
    target: str
    about: str
    options: tuple[str, ...] = ()

    def read(self) -> Read:
        module, _, function = self.target.partition(":")
        return getattr(importlib.import_module(f".{module}", __package__), function)


CONVERTERS: dict[str, Converter] = {
    "text-game": Converter(
        PAIR, "text_game:read", "GPT-simulator JSONL or zip, or a checkout's data folder", ("which", "rules", "examples", "split")
    ),
    "text-game-crawl": Converter(
        PAIR, "crawl:read", "transitions rebuilt by running the games of a GPT-simulator checkout", ("which", "rules", "examples", "games")
    ),
    "rlvr-parquet": Converter(PAIR, "parquet:read_rlvr", "RLVR-World parquet: text game and web page"),
    "web-tasks": Converter(TASK, "web_tasks:read", "WebArena task configurations"),
    "webrl": Converter(TEXT, "webrl:read", "WebRL traces and actions, one sample a step", ("replay",)),
    "sharegpt": Converter(TEXT, "chat:read_sharegpt", "LLaMA-Factory sharegpt JSON"),
    "chat": Converter(TEXT, "chat:read_jsonl", "JSONL with messages"),
    "hf": Converter(TEXT, "parquet:read_hf", "a Hugging Face datasets folder (parquet or arrow) of chats"),
    "npz": Converter(VIDEO, "npz:read", "npz episodes: image, action", ("split",)),
    "rt1": Converter(VIDEO, "rt1:read", "RT-1 episodes in TFRecord (RLDS), read without TensorFlow", ("image",)),
}


@dataclass
class ConvertReport:
    """What a conversion read, wrote and dropped."""

    converter: str
    source: str
    read: int = 0
    written: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)  # of what was dropped, by reason
    counts: dict[str, int] = field(default_factory=dict)  # of properties of the samples, by name

    def drop(self, reason: str, where: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        if len(self.examples.setdefault(reason, [])) < EXAMPLES:
            self.examples[reason].append(where)

    def count(self, sample: dict[str, Any]) -> None:
        """Count the true flags of a sample's description (gold, changed, ...)."""
        for name in ("extra.json", "meta.json"):
            for flag, value in sample.get(name, {}).items():
                if value is True:
                    self.counts[flag] = self.counts.get(flag, 0) + 1


def convert(
    name: str,
    source: str | Path,
    out: str | Path | None,
    *,
    resume: bool = False,
    max_bytes: int = 256 << 20,
    limit: int | None = None,
    tell: Callable[[float, ConvertReport], None] | None = None,
    **options: Any,
) -> ConvertReport:
    """Run a converter; with `out` None it is a dry run, which reads and checks everything and writes nothing.

    The cursor and the report so far are kept in each shard's index, so a killed conversion resumes to the same shards and report.
    """
    if name not in CONVERTERS:
        raise ConfigError(f"unknown converter {name!r}, expected one of {', '.join(CONVERTERS)}")
    chosen = CONVERTERS[name]
    unknown = sorted(set(options) - set(chosen.options))
    if unknown:
        raise ConfigError(f"converter {name} has no option {unknown[0]!r}; it has {', '.join(chosen.options) or 'none'}")
    report = ConvertReport(name, Path(source).name)
    if not Path(source).exists():
        raise ConfigError(f"{source}: not there")
    writer = None if out is None else ShardWriter(out, kind=chosen.kind, max_bytes=max_bytes, resume=resume, check=False)
    cursor = None
    if writer is not None and writer.cursor is not None:
        cursor, report = writer.cursor["at"], ConvertReport(**writer.cursor["report"])
    try:
        for item in chosen.read()(Path(source), cursor, **options):
            report.read += 1
            _take(item, chosen.kind, writer, report)
            if tell is not None:
                tell(item.done, report)
            if limit is not None and report.read >= limit:
                break
    except BaseException:
        if writer is not None:
            writer.abort()
        raise
    if writer is not None:
        writer.close()
        write_json(Path(out or ".") / REPORT, report.__dict__)
    return report


def _take(item: Item, kind: str, writer: ShardWriter | None, report: ConvertReport) -> None:
    if item.sample is None:
        report.drop(item.dropped or "no reason given", item.where)
        return
    number = report.written
    key = item.key if item.key is not None else f"{number:09d}"
    try:
        check_sample(KINDS[kind], item.sample, shard=report.source, key=key)
        members = encode_sample(item.sample)
    except (ShardError, ValueError) as error:
        report.drop("does not fit the schema", f"{item.where}: {getattr(error, 'field', None) or ''} {getattr(error, 'reason', error)}")
        return
    report.written += 1
    report.count(item.sample)
    if writer is not None:
        # the report is copied: a shard's cursor must say how things stood at its last sample
        told = {k: _copied(v) for k, v in report.__dict__.items()}
        writer.write_encoded(members, key=key, cursor={"at": item.cursor, "report": told})


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: list(v) if isinstance(v, list) else v for k, v in value.items()}
    return value
