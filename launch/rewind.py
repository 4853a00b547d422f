"""`--back-to STAGE[:STEP]`: a run continues from an earlier point. Later results are moved aside, never deleted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..core.errors import ConfigError
from ..core.run import Run, set_aside


def back_to(run: Run, names: Sequence[str], target: str) -> Path | None:
    """Undo the stage's end, its checkpoints after STEP, and all later stages; returns the folder that they were moved
    to, None if there was nothing.

    Without STEP the stage continues from its newest complete checkpoint; with 0, or without a checkpoint, it starts
    over.
    """
    stage, _, number = target.partition(":")
    if stage not in names:
        raise ConfigError(f"--back-to {target}: the recipe's stages are {', '.join(names)}")
    if number and not number.isdigit():
        raise ConfigError(f"--back-to {target}: the step after ':' must be a whole number")
    kept = run.path / "checkpoints" / stage
    steps = {int(path.name.removeprefix("step-")): path for path in kept.glob("step-*")}
    if number and int(number) not in {0, *steps}:
        known = ", ".join(map(str, sorted(steps))) or "none"
        raise ConfigError(f"--back-to {target}: the steps of stage {stage} that have a checkpoint are: {known}")
    later = list(names[names.index(stage) + 1 :])
    beyond = [run.path / "stages" / f"{stage}.{kind}" for kind in ("json", "sums")]
    if number:
        for folder in (kept, kept.with_name(f"{stage}-critic")):
            beyond += [path for path in folder.glob("step-*") if int(path.name.removeprefix("step-")) > int(number)]
    if not [step for step in steps if step and (not number or step <= int(number))]:
        beyond.append(run.path / "stages" / stage)
    for name in later:
        beyond += left_by(run.path, name, names)
    beyond += [run.path / "summary.json", run.path / "report.html"]
    run.guard()
    run.metrics.rewind(stage, int(number) if number else max(steps, default=0), tuple(later))
    return set_aside(run.path, beyond)


def left_by(run: Path, stage: str, names: Sequence[str]) -> list[Path]:
    """The files that a stage, one of `names`, may have left: outcome, data, checkpoints, tables, samples."""
    tables = [path for folder in ("results", "rollouts") for path in (run / folder).glob(f"{stage}*.json*")]
    return [
        *(run / "stages" / f"{stage}{kind}" for kind in (".json", ".sums", "")),
        *(run / "checkpoints" / f"{stage}{kind}" for kind in ("", "-critic")),
        *(path for path in tables if _writer(path.stem, names) == stage),
    ]


def _writer(stem: str, names: Sequence[str]) -> str | None:
    """The stage that wrote a table or a sample: eval-base-reward belongs to stage eval-base, if that exists."""
    return max((name for name in names if f"{stem}-".startswith(f"{name}-")), key=len, default=None)
