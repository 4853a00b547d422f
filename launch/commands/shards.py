"""`terrella shards`: make, teacher, inspect, verify, stats, head, and web, which has a file of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...core.errors import ConfigError, StorageError
from ..language import spread
from .web import web

if TYPE_CHECKING:
    from ...data.shards import ShardSet


@click.group()
def shards() -> None:
    """Make, inspect and verify WebDataset shards."""


shards.add_command(web)


def _options(pairs: tuple[str, ...], converter: str, known: tuple[str, ...]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign:
            raise ConfigError(f"-o {pair}: write it as name=value")
        if name not in known:
            raise ConfigError(
                f"-o {pair}: converter {converter} has no option {name!r}; it has {', '.join(known) or 'none'}"
            )
        options[name] = value
    return options


@shards.command()
@click.argument("converter", required=False)
@click.argument("source", required=False)
@click.argument("out", required=False)
@click.option(
    "-o", "option", multiple=True, metavar="NAME=VALUE", help="An option of the converter, such as which=gold."
)
@click.option("--dry-run", is_flag=True, help="Read and check everything, write nothing.")
@click.option("--resume", is_flag=True, help="Go on after the whole shards that are there.")
@click.option("--limit", type=click.IntRange(0), help="Stop after so many records of the source.")
@click.option("--workers", type=click.IntRange(0), default=0, help="Processes that check and encode.")
@click.option("--max-mb", type=click.IntRange(1), default=256, help="Largest size of a shard.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def make(
    converter: str | None,
    source: str | None,
    out: str | None,
    option: tuple[str, ...],
    dry_run: bool,
    resume: bool,
    limit: int | None,
    workers: int,
    max_mb: int,
    as_json: bool,
) -> None:
    """Convert SOURCE with CONVERTER into shards at OUT. Without arguments: list the converters."""
    from ...core.progress import Progress
    from ...data.convert import CONVERTERS, ConvertReport, convert

    if converter is None:
        for name, c in CONVERTERS.items():
            options = f"  (-o {', '.join(c.options)})" if c.options else ""
            click.echo(f"{name:16} {c.kind or 'any':18} {c.about}{options}")
        return
    if source is None or (out is None and not dry_run):
        raise ConfigError("name a converter, a source and an output folder (or --dry-run)")
    if Path(source).exists() and out is not None and Path(out).resolve() == Path(source).resolve():
        raise ConfigError(f"{out}: the output folder is the source")
    progress = Progress(f"{converter} {Path(source).name}", 1000, speak=not as_json)

    def tell(done: float, report: ConvertReport) -> None:
        progress.update(min(int(1000 * done), 999), f"{report.written} written, {sum(report.dropped.values())} dropped")

    target = None if dry_run else out
    known = CONVERTERS[converter].options if converter in CONVERTERS else ()
    settings = _options(option, converter, known) | {"max_bytes": max_mb << 20, "limit": limit, "workers": workers}
    report = convert(converter, source, target, resume=resume, tell=tell, **settings)
    if as_json:
        click.echo(json.dumps(report.__dict__, ensure_ascii=False))
        return
    click.echo(
        f"{'would write' if dry_run else 'wrote'} {report.written} of {report.read} records"
        + ("" if dry_run else f" to {out}")
    )
    for name, count in sorted(report.counts.items()):
        click.echo(f"  {name}: {count}")
    for reason, count in sorted(report.dropped.items(), key=lambda pair: -pair[1]):
        click.echo(f"  dropped {count}: {reason} (such as {report.examples[reason][0]})")


@shards.command()
@click.argument("source")
@click.argument("out")
@click.option(
    "--url",
    required=True,
    help="An OpenAI-compatible address, http://host:8000/v1; its key is read from TERRELLA_API_KEY.",
)
@click.option("--model", required=True, help="The teacher's name there.")
@click.option(
    "--tokenizer",
    required=True,
    help="The model that is to imitate: a folder, or owner/name@commit; lengths are counted by it.",
)
@click.option("--max-tokens", type=click.IntRange(1), default=4000, help="Drop longer answers, reasoning included.")
@click.option(
    "--keep-unchanged", type=click.FloatRange(0, 1), default=0.01, help="Share kept of rows without a change."
)
@click.option("--n", type=click.IntRange(1), help="Ask only so many questions, spread over the source.")
@click.option("--temperature", type=click.FloatRange(0), default=0.6)
@click.option("--together", type=click.IntRange(1), default=8, help="Requests in flight.")
@click.option("--seed", type=int, default=0)
def teacher(
    source: str,
    out: str,
    url: str,
    model: str,
    tokenizer: str,
    max_tokens: int,
    keep_unchanged: float,
    n: int | None,
    temperature: float,
    together: int,
    seed: int,
) -> None:
    """Ask a teacher the questions at SOURCE (shards of pairs); its right answers, with their reasoning, become shards
    at OUT.

    Every answer is noted in OUT.responses.jsonl as it comes: after an interruption the same command asks only what is
    missing.
    """
    from ...core.progress import Progress
    from ...data.schema import PAIR
    from ...data.shards import ShardSet, ShardWriter
    from ...data.tokenizers import load_tokenizer
    from ...models.hub import resolve
    from ...rl.language import read_pair
    from ...rl.text_games.teacher import Harvest, Teacher, reasoned_samples

    words, found = load_tokenizer(resolve(tokenizer)), ShardSet(source)
    pairs = [(sample, read_pair(sample)) for sample in spread(found, n or len(found))]
    key = os.environ.get("TERRELLA_API_KEY", "")
    asked = Teacher(url, model, key=key, temperature=temperature, max_tokens=max_tokens, together=together)
    harvest, progress = Harvest(), Progress("answers", len(pairs))
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    with ShardWriter(out, kind=PAIR) as writer:
        answers = asked.ask_once([question.prompt for _, question in pairs], Path(f"{out.rstrip('/')}.responses.jsonl"))

        def counted() -> Any:
            for done, answer in enumerate(answers, 1):
                progress.update(done, f"{harvest.kept} kept")
                yield answer

        settings = {"max_tokens": max_tokens, "keep_unchanged": keep_unchanged, "seed": seed}
        for sample in reasoned_samples(pairs, counted(), lambda text: len(words.encode(text)), harvest, **settings):
            writer.write(
                {name: value for name, value in sample.items() if not name.startswith("__")}, key=sample["__key__"]
            )
    click.echo(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in harvest.__dict__.items()))
    if harvest.invalid == harvest.asked:
        raise StorageError(f"{url}: not one question was answered; the same command asks again")


@shards.command()
@click.argument("where")
@click.option("--sample", "which", default="0", help="Its number or its key.")
@click.option("--png", type=click.Path(path_type=Path), help="Write the frames of a video as one contact sheet.")
@click.option("--lines", default=40, help="Most lines of one field.")
def inspect(where: str, which: str, png: Path | None, lines: int) -> None:
    """Show one sample of the shards at WHERE."""
    from ...data.png import encode_png
    from ...data.preview import contact_sheet, describe
    from ...data.shards import ShardSet

    shard_set = ShardSet(where)
    sample = _by_key(shard_set, which)
    if sample is None:
        if not which.isdigit() or int(which) >= len(shard_set):
            raise ConfigError(f"{where}: no sample {which}; there are {len(shard_set)}, from 0")
        sample = shard_set[int(which)]
    for line in describe(sample, lines=lines):
        click.echo(line)
    if png is not None:
        sheet = contact_sheet(sample)
        if sheet is None:
            raise ConfigError(f"{where}: sample {sample['__key__']} holds no pictures to put on a sheet")
        png.write_bytes(encode_png(sheet))
        click.echo(f"contact sheet: {png}")


def _by_key(found: ShardSet, key: str) -> dict[str, Any] | None:
    for number in range(len(found.paths)):
        shard = found.shard(number)
        if key in shard.keys:
            return shard.sample(shard.keys.index(key))
    return None


@shards.command()
@click.argument("where")
@click.option("--quarantine", is_flag=True, help="Set bad samples aside in quarantine.json; readers pass over them.")
@click.option("--json", "as_json", is_flag=True)
def verify(where: str, quarantine: bool, as_json: bool) -> None:
    """Read everything at WHERE: sizes, checksums, every member, schemas, keys that occur twice."""
    from ...core.progress import Progress
    from ...data.shards.verify import verify as check

    progress: list[Progress] = []

    def tell(done: int, total: int) -> None:
        if not progress:
            progress.append(Progress("verify", total, speak=not as_json))
        progress[0].update(done)

    report = check(where, quarantine=quarantine, tell=tell)
    if as_json:
        problems = [problem.__dict__ for problem in report.problems]
        click.echo(json.dumps({**report.__dict__, "problems": problems}, ensure_ascii=False))
    else:
        for problem in report.problems:
            click.echo(f"bad  {problem}")
        counted = f"{report.samples} samples in {report.shards} shards, {report.already_aside} already in quarantine"
        click.echo(f"{counted}, {len(report.problems)} problems")
        if quarantine and report.bad_samples:
            click.echo(f"{len(report.bad_samples)} samples set aside")
    if report.bad_shards or (report.problems and not quarantine):
        raise StorageError(f"{where}: {len(report.problems)} problems; bad samples can be set aside with --quarantine")


@shards.command()
@click.argument("where")
@click.option("--json", "as_json", is_flag=True)
def stats(where: str, as_json: bool) -> None:
    """Counts and sizes at WHERE, from the indexes alone."""
    from ...data.shards.verify import statistics

    counts = statistics(where)
    if as_json:
        click.echo(json.dumps(counts))
        return
    click.echo(
        f"{counts['samples']} samples in {counts['shards']} shards, {counts['bytes'] / 1e6:.1f} MB, "
        f"{counts['quarantined']} in quarantine"
    )
    for kind, count in counts["kinds"].items():
        click.echo(f"  {kind}: {count}")
    click.echo(f"  {'field':24} {'count':>9} {'MB':>9} {'p05 B':>9} {'median B':>9} {'p95 B':>9}")
    for name, f in counts["fields"].items():
        click.echo(f"  {name:24} {f['count']:9} {f['bytes'] / 1e6:9.2f} {f['p05']:9} {f['median']:9} {f['p95']:9}")


@shards.command()
@click.argument("where")
@click.option("-n", "count", default=5, help="How many samples.")
@click.option("--seed", type=int, help="In the order of this seed instead of file order.")
def head(where: str, count: int, seed: int | None) -> None:
    """The first samples at WHERE, one JSON line each (arrays by their shape)."""
    import numpy as np

    from ...data.shards import Reader, ShardSet, ShuffledOrder

    samples = ShardSet(where)
    order = ShuffledOrder(samples.counts, seed=seed or 0, shuffle=seed is not None)
    for _, sample in zip(range(count), Reader(samples, order, epochs=1), strict=False):
        shown = {}
        for field, value in sample.items():
            if isinstance(value, np.ndarray):
                value = f"{value.dtype}{list(value.shape)}"
            elif isinstance(value, bytes):
                value = f"{len(value)} bytes"
            shown[field] = value
        click.echo(json.dumps(shown, ensure_ascii=False))
