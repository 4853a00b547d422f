"""`terrella train RECIPE --steps N` on a finished or unfinished run: it continues from its last checkpoint to step N.

Stages that depend on an extended one run again; their old results are moved to RUN/set-aside, not deleted.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from ..core import lease as leases
from ..core import schema
from ..core.by_path import named_in, require_same_file
from ..core.errors import ConfigError
from ..core.files import read_json, write_atomic
from ..core.run import ASIDE, Run, set_aside
from ..rl.own.config import DataEnvironment, OwnEnvironment
from .recipe import Recipe, refuse_old_kinds
from .rewind import left_by
from .settings.base import OnPolicy, references


def with_steps(config: Recipe, asked: tuple[str, ...]) -> Recipe:
    """The recipe with `N` steps in every RL stage (in every training stage where there is no RL), or with `STAGE=N` in
    that one.

    Neither a budget of actions nor epochs end a stage whose steps are given.
    """
    for text in asked:
        stage, _, number = text.rpartition("=")
        if not number.isdigit() or int(number) < 1:
            raise ConfigError(f"--steps {text}: give a number of steps, or STAGE=NUMBER")
        counted = [s for s in config.stages if getattr(s, "steps", None) is not None or _epochs(s)]
        reinforced = [s for s in counted if isinstance(s, OnPolicy)]
        chosen = {s.name for s in (counted if stage else reinforced or counted) if stage in ("", s.name)}
        if not chosen:
            known = ", ".join(s.name for s in counted)
            raise ConfigError(
                f"--steps {text}: "
                + (f"the stages with steps are {known}" if known else "no stage of this recipe has steps")
            )
        stages: list[Any] = [*config.stages]
        for i, one in enumerate(stages):
            if one.name in chosen:
                stages[i] = replace(one, steps=int(number), **_freed(one))
        config = replace(config, stages=stages)
    return config


def _epochs(stage: Any) -> bool:
    """Whether a stage that could be bounded by steps is bounded by epochs."""
    return hasattr(stage, "steps") and getattr(stage, "epochs", None) is not None


def _freed(stage: Any) -> dict[str, None]:
    """Settings that no longer end a stage whose steps are given: a budget of actions, or epochs."""
    ends = (("actions", getattr(stage, "actions", None) is not None), ("epochs", _epochs(stage)))
    return {name: None for name, given in ends if given}


def extend(folder: Path, config: Recipe, wait_s: float = 0.0) -> list[str]:
    """Prepare the run at `folder` to continue with more steps; returns the stages that will continue. A new run is left
    alone.
    """
    stored = folder / "config.yaml"
    if not stored.exists():
        return []
    tree = schema.parse_yaml(stored.read_text(encoding="utf-8"), str(stored))
    refuse_old_kinds(tree)
    old = schema.build(Recipe, tree)
    before, after = ({s.name: getattr(s, "steps", None) for s in c.stages} for c in (old, config))
    longer = [name for name, steps in after.items() if before.get(name) != steps]
    for name in longer:
        outcome = read_json(folder / "stages" / f"{name}.json") or {}
        saved = (int(step.name[5:]) for step in (folder / "checkpoints" / name).glob("step-??????"))
        trained = outcome["steps"] if "steps" in outcome else max(saved, default=0)
        if (after[name] or 0) < trained:
            raise ConfigError(
                f"--steps: stage '{name}' of {folder} has {trained} steps already, more than {after[name]}; give a "
                f"larger number to go on, such as --steps {name}={2 * trained}, or another --run folder to begin anew"
            )
        if outcome.get("exploited"):
            raise ConfigError(
                f"--steps: stage '{name}' of {folder} was ended at step {trained} by validation.on_gap = stop; "
                f"begin another --run with stages.{name}.validation.on_gap = warn, or with a higher max_gap"
            )
        left = read_json(folder / outcome["checkpoint"] / "manifest.json") if outcome.get("checkpoint") else None
        if trained and left and not left.get("optimizer"):
            raise ConfigError(
                f"--steps: the optimizer's state of stage '{name}' of {folder} was dropped when a later stage trained; "
                f"--back-to {name}:0 trains it again, and a run of stages.{name}.checkpoints.finished = whole keeps "
                "the state"
            )
    free = {s.name: {"steps": after[s.name], **_freed(s)} for s in old.stages if s.name in longer}
    if not longer or replace(old, stages=[replace(s, **free.get(s.name, {})) for s in old.stages]) != config:
        return []  # nothing to lengthen, or other settings differ too, which opening the run refuses by name
    _require_same_files(config, folder)
    lease = leases.Lease.acquire(folder, wait_s)
    try:
        beyond = [folder / "summary.json", folder / "report.html"]
        for name in longer:
            beyond += [folder / "stages" / f"{name}.{kind}" for kind in ("json", "sums")]
        for name in _dependents(old, longer):
            beyond += left_by(folder, name, [stage.name for stage in old.stages])
        set_aside(folder, beyond)
        write_atomic(stored, f"# digest: {schema.digest(config)}\n{schema.dump(config)}")
    finally:
        lease.release()
    return longer


def _require_same_files(config: Recipe, folder: Path) -> None:
    """Refuse changed rows, rewards and code now, before results are moved."""
    from .stages.verbs import environments_of, require_same_files

    for own in named_in(config):
        require_same_file(own.path, Path(), own.digest)
    for settings in environments_of(config):
        if isinstance(settings, DataEnvironment | OwnEnvironment):
            require_same_files(settings, Run(folder, ""))


def _dependents(config: Recipe, roots: list[str]) -> list[str]:
    """The stages that use the outcome of a root, directly or through others, the roots left out."""
    found = set(roots)
    for stage in config.stages:
        if found & set(references(stage, config.env)):
            found.add(stage.name)
    return [stage.name for stage in config.stages if stage.name in found and stage.name not in roots]


def explain(folder: Path, names: list[str]) -> str:
    """One line for the terminal."""
    steps = {
        s["name"]: s.get("steps")
        for s in yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["stages"]
    }
    targets = ", ".join(f"{name} to step {steps[name]}" for name in names)
    aside = folder / ASIDE
    kept = f"; dependent stages run again, their old results are in {aside}" if aside.exists() else ""
    return f"{folder}: going on with {targets}{kept}"
