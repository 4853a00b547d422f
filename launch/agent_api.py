"""`terrella eval TAG --url URL --model NAME`: a served model as an agent in any world, beside the random policy and
the ceiling.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..core.errors import ConfigError
from ..core.files import write_json
from ..core.progress import Progress


def evaluate_agent(
    tag: str,
    model: str,
    *,
    url: str,
    key: str,
    seeds: int,
    samples: int,
    settings: Any,
    temperature: float,
    max_new_tokens: int,
    tags_file: Path | None,
    out: Path | None,
) -> None:
    """Play, score and print the table with 95 % intervals over seeds."""
    from ..rl.agents.api import ApiPlayer
    from ..rl.agents.evaluate import baseline_rows, summarise
    from ..rl.agents.rollout import Instance, seats_of
    from ..rl.text_games.teacher import Teacher
    from ..rl.worlds.tasks import load_tasks

    tasks = load_tasks(*([tags_file] if tags_file else []))
    if tag not in tasks:
        raise ConfigError(f"'{tag}' is no tag; there are {', '.join(tasks)}")
    task, first = tasks[tag], 123
    if settings.coordinates and "text_with_coordinates" not in task.make().render_modes:
        raise ConfigError(f"--coordinates: {tag} has no coordinates to show")
    seats = seats_of([Instance(task, first + number) for number in range(seeds)], samples)
    progress = Progress(f"{tag} with {model}", len(seats))
    player = ApiPlayer(Teacher(url, model, key=key, temperature=temperature, max_tokens=max_new_tokens), settings)
    scores = summarise(player.play(seats, progress=lambda done: progress.update(done)))
    if not scores.wins:
        raise ConfigError(
            f"--url {url}: no episode could be finished; is the address right, and the key in TERRELLA_API_KEY?"
        )
    rows = [
        (name, kind, [one, many]) for name, kind, one, many in baseline_rows(task, range(first, first + seeds), samples)
    ]
    rows.insert(1, (model, "model", [scores.passes(1), scores.passes(samples)]))
    columns = ["Pass@1", f"Pass@{samples}"]
    click.echo(f"{tag:40}" + "".join(f"{column:>24}" for column in columns))
    for name, _, cells in rows:
        click.echo(
            f"{name[:39]:40}"
            + "".join(f"{f'{100 * c.value:.1f} ({100 * c.low:.1f}-{100 * c.high:.1f})':>24}" for c in cells)
        )
    click.echo(
        f"{seeds} seeds from {first}, {samples} samples each, {scores.invalid} invalid; format right in "
        f"{100 * scores.format_ok.value:.1f} % of turns, "
        f"last action had an effect in {100 * scores.effective.value:.1f} %, {scores.tokens.value:.0f} words an episode"
    )
    if out:
        told = [{"name": name, "kind": kind, "cells": [c.to_cell() for c in cells]} for name, kind, cells in rows]
        write_json(
            out,
            {
                "title": f"{tag}: success",
                "columns": columns,
                "rows": told,
                "note": f"{scores.invalid} invalid samples left out",
            },
        )
