"""What an export's README.md says of the run behind it: recipe, base model, data, scores beside baselines, and the
prompt format.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ... import __version__
from ...core import schema
from ...core.files import read_json
from ...core.run import ROWS
from ..job import Job
from ..recipe import Recipe
from ..report.load import load_run
from ..report.rollouts import recorded_prompt
from ..report.tables import Table, build_tables
from ..settings.base import OnPolicy
from .verbs import environments_of


def base_of(recipe: Recipe, model: str) -> str | None:
    """The folder or pinned hub id that a stage's model was trained from; None where it began with fresh weights."""
    first = _lineage(recipe, model)[0]
    return getattr(first, "folder", None)


def about_run(job: Job, model: str, chats: bool) -> str:
    """The card's sections about the run that trained the model of stage `model`; its evaluations are those that ran
    before the export.
    """
    recipe, run = job.recipe, load_run(job.run.path)
    base = base_of(recipe, model) or "fresh weights"
    parts = [
        "## Training",
        f"- Recipe `{recipe.name}`, seed {recipe.seed}, with Terrella {__version__}; all its settings are at "
        "the end of this page.\n"
        f"- Base model: {base}\n" + "\n".join(_stage_lines(job, model)),
        "\n".join(_data_lines(job)),
        "## Scores",
        *_scores(run.summary.get("headline"), build_tables([run]), recipe.seed),
        "## Prompt format",
        *_prompt(job, chats),
        "## Recipe",
        _indented(schema.dump(recipe)),
    ]
    return "\n\n".join(parts)


def _lineage(recipe: Recipe, model: str) -> list[Any]:
    """The stages whose weights went into a model, the first one first."""
    stages = {stage.name: stage for stage in recipe.stages}
    lineage = [stages[model]]
    while (init := getattr(lineage[0], "init", None)) is not None:
        lineage.insert(0, stages[init])
    return lineage


def _stage_lines(job: Job, model: str) -> Iterator[str]:
    stage: Any
    for stage in _lineage(job.recipe, model):
        outcome = job.outcome(stage.name)
        counts = [
            f"{outcome[key]:,} {words}"
            for key, words in (("steps", "steps"), ("tokens", "gradient tokens"))
            if outcome.get(key)
        ]
        algorithm = [stage.algorithm.kind] if hasattr(stage, "algorithm") else []
        yield f"- Stage `{stage.name}`: {', '.join([stage.kind, *algorithm, *counts])}"


def _data_lines(job: Job) -> Iterator[str]:
    digests: dict[str, str] = read_json(job.run.path / ROWS) or {}
    yield "Data:\n"
    for settings in dict.fromkeys(map(schema.dump, environments_of(job.recipe))):
        yield f"- an environment of these settings:\n\n{_indented(settings, 8)}\n"
    for path, digest in digests.items():
        if path != "digest":
            kind = "sha256" if len(digest) == 64 else "xxh3-128"  # of a module beside the user's code, and of rows
            yield f"- `{path}`: {kind} {digest}"


def _scores(headline: str | None, tables: list[Table], seed: int) -> Iterator[str]:
    if not tables:
        yield "The run made no evaluation before this export."
        return
    if headline:
        yield headline
    for table in tables:
        for _, rows, note in table.bodies:
            lines = [_row([table.title, "", *table.columns]), _row(["---"] * (2 + len(table.columns)))]
            lines += [
                _row([row.name, row.kind, *(_cell(cell.text, cell.interval, cell.sample) for cell in row.cells)])
                for row in rows
            ]
            yield "\n".join(lines)
            if note:
                yield note
    yield (
        f"One run with seed {seed}: intervals are 95 % over the samples of that evaluation, and say nothing of "
        "other seeds."
    )


def _cell(text: str, interval: str, sample: str) -> str:
    beside = ", ".join(part for part in (interval, sample) if part)
    return f"{text} ({beside})" if beside else text


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _prompt(job: Job, chats: bool) -> Iterator[str]:
    if chats:
        yield "The tokenizer's chat template (`tokenizer.apply_chat_template`)."
    stages = [stage.name for stage in job.recipe.stages if isinstance(stage, OnPolicy)]
    prompt = recorded_prompt(job.run.path, stages)
    if prompt is not None:
        path, text = prompt
        yield f"One prompt, exactly as the model read it (from `{path.relative_to(job.run.path)}` of the run):"
        yield _indented(text)
    elif not chats:
        yield "The run kept no prompt in words."


def _indented(text: str, by: int = 4) -> str:
    """A block of code in Markdown, whatever characters it holds."""
    return "\n".join(" " * by + line for line in text.rstrip("\n").split("\n"))
