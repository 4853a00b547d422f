"""`terrella eval TAG --url URL --model NAME`: a served model as an agent in any world, beside the random policy and
the ceiling.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import ConfigError
from ..core.progress import Progress

if TYPE_CHECKING:
    from ..rl.agents.config import AgentSettings
    from ..rl.text_games.teacher import Teacher


def evaluate_agent(
    tag: str, teacher: Teacher, settings: AgentSettings, seeds: int, samples: int, tags_file: Path | None
) -> dict[str, Any]:
    """Play and score: the table with 95 % intervals over seeds."""
    from ..rl.agents.api import ApiPlayer
    from ..rl.agents.evaluate import baseline_rows, summarise
    from ..rl.agents.rollout import Instance, seats_of
    from ..rl.worlds.tasks import load_tasks

    tasks = load_tasks(*([tags_file] if tags_file else []))
    if tag not in tasks:
        raise ConfigError(f"'{tag}' is no tag; there are {', '.join(tasks)}")
    task, first = tasks[tag], 123
    if settings.coordinates and "text_with_coordinates" not in task.make().render_modes:
        raise ConfigError(f"--coordinates: {tag} has no coordinates to show")
    seats = seats_of([Instance(task, first + number) for number in range(seeds)], samples)
    progress = Progress(f"{tag} with {teacher.model}", len(seats))
    scores = summarise(ApiPlayer(teacher, settings).play(seats, progress=lambda done: progress.update(done)))
    if not scores.wins:
        raise ConfigError(
            f"--url {teacher.url}: no episode could be finished; is the address right, and the key in TERRELLA_API_KEY?"
        )
    tries = sorted({1, samples})
    rows = [
        (name, kind, [one, many][: len(tries)])
        for name, kind, one, many in baseline_rows(task, range(first, first + seeds), samples)
    ]
    rows.insert(1, (teacher.model, "model", [scores.passes(k) for k in tries]))
    return {
        "title": f"{tag}: success",
        "columns": [f"Pass@{k}" for k in tries],
        "rows": [{"name": name, "kind": kind, "cells": [c.to_cell() for c in cells]} for name, kind, cells in rows],
        "note": f"{seeds} seeds from {first}, {samples} sample{'s' * (samples > 1)} each, "
        f"{scores.invalid} invalid samples left out; "
        f"format right in {100 * scores.format_ok.value:.1f} % of turns, last action had an effect in "
        f"{100 * scores.effective.value:.1f} %, {scores.tokens.value:.0f} words an episode",
    }
