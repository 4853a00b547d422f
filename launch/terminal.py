"""A run's messages on the terminal: progress and remaining time, and at the end what was learnt and what to do next."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from . import recipe as recipes
from .commands.recipes import catalogue
from .recipe_files import shipped
from .task_options import GENERIC

WIDTH = 80


def stage_line(recipe: recipes.Recipe, stage: str, outcomes: Mapping[str, dict[str, Any] | None]) -> str:
    """ "stage 3 of 6: rl, about 4 minutes left"; the time only where the recipe's stages were once measured."""
    names = [s.name for s in recipe.stages]
    took = {
        name: float(outcome["time/stage_s"])
        for name, outcome in outcomes.items()
        if outcome and "time/stage_s" in outcome
    }
    left = seconds_left(expected_seconds(recipe), took, [name for name in names if outcomes[name] is None])
    return f"stage {names.index(stage) + 1} of {len(names)}: {stage}" + (
        "" if left is None else f", {in_words(left)} left"
    )


def expected_seconds(recipe: recipes.Recipe) -> dict[str, float]:
    """Measured seconds of each stage, for a shipped recipe with at most the seed changed; else empty."""
    measured = catalogue().get(recipe.name, {}).get("seconds", {})
    try:
        same = bool(measured) and replace(recipes.load(recipe.name), seed=recipe.seed) == recipe
    except ConfigError:
        same = False
    return measured if same else {}


def seconds_left(expected: Mapping[str, float], took: Mapping[str, float], left: list[str]) -> float | None:
    """Time of the remaining stages, scaled by the pace of the finished ones; None if one of them was never measured."""
    if not left or any(name not in expected for name in left):
        return None
    known = [name for name in took if name in expected]
    pace = sum(took[name] for name in known) / sum(expected[name] for name in known) if known else 1.0
    return pace * sum(expected[name] for name in left)


def in_words(seconds: float) -> str:
    """An approximate duration: in minutes, or in tens of seconds below one minute."""
    if seconds < 55:
        return f"about {max(10, round(seconds / 10) * 10)} seconds"
    minutes = round(seconds / 60)
    return f"about {minutes} minute{'s' if minutes > 1 else ''}"


def ending(folder: Path, kept: bool = True) -> str:
    """The end screen: what was learnt, and warnings with remedies; if the run is kept, also where its files are and
    three next commands.
    """
    from .report import findings_of, summary_of
    from .report.load import load_run

    run = load_run(folder)
    headline, paragraphs = summary_of(run)
    lines = [*wrap(headline), ""]
    for text in paragraphs:
        lines += wrap(text)
    loud = [finding for finding in findings_of([run]) if finding.level != "note"]
    lines += ["", "Warnings:" if loud else "No warnings."]
    for finding in loud:
        lines += wrap(f"{finding.text}", "- ")
    if not kept:
        return "\n".join(lines)
    lines += ["", f"Report:  {folder / 'report.html'}", f"Metrics: {folder / 'metrics.jsonl'}"]
    model = (folder / "export").is_dir()
    if model:
        lines.append(f"Model:   {folder / 'export'} (a Hugging Face folder)")
    return "\n".join([*lines, "", "Next:", *(f"  {line}" for line in next_commands(folder, run.config, model))])


def next_commands(folder: Path, config: dict[str, Any], model: bool) -> list[str]:
    """Three commands worth typing now."""
    program = "terrella" if shutil.which("terrella") else program_name(sys.argv[0])
    name = str(config.get("name", ""))
    steps = max((int(s.get("steps") or 0) for s in config.get("stages", []) if s.get("algorithm")), default=0)
    commands = [f"{opener()} {folder / 'report.html'}"]
    if model and any((folder / "export").glob("tokenizer*")):
        commands.append(f"{program} generate {folder}")
    if steps and name in shipped():
        same = folder / "config.yaml" if name in GENERIC else name  # which holds the user's own model, data and reward
        commands.append(f"{program} train {same} --run {folder} --steps {2 * steps}")
    return [*commands, f"{program} recipes"][:3]


def opener() -> str:
    return "open" if sys.platform == "darwin" else "xdg-open"


def program_name(started: str) -> str:
    """The command that runs this program, which may not be on the path."""
    path = Path(started)
    if path.name != "terrella":
        return "python -m terrella"
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def wrap(text: str, mark: str = "") -> list[str]:
    """Lines of at most 80 columns; what cannot be broken, such as a path, stays whole."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=mark,
        subsequent_indent=" " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )
