"""Terrella from Python: `terrella.train` and `terrella.evaluate` do what the command line does, in the same run
directories.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..core import schema
from ..core.by_path import ByPath, require_same_file
from ..core.errors import ConfigError
from ..core.files import read_json
from ..core.run import ROWS, Run
from ..rl.own.config import DataEnvironment, EnvironmentSettings
from .recipe_files import run_folder
from .task_options import EVALUATION, as_settings, chosen_recipe, path_of, settings_of


@dataclass(frozen=True)
class RunResult:
    """What a finished run left."""

    run: Path  # its directory: report.html, metrics.jsonl, checkpoints
    results: dict[str, Any] = field(default_factory=dict)  # tables of its evaluations, by the stage's name
    summary: dict[str, Any] | None = None  # what happened, in words
    export: Path | None = None  # the trained model as a Hugging Face folder


def train(
    recipe: str | Path,
    *,
    size: str | None = None,
    model: str | Path | None = None,
    data: str | Path | None = None,
    test: str | Path | None = None,
    reward: str | Callable[..., Any] | None = None,
    template: str | Path | None = None,
    env: str | type | None = None,
    run: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> RunResult:
    """Run a recipe (grpo, ppo, sft, another that ships, or a YAML file) to its end; called again with the same
    settings, it resumes.

    `size` and `env` choose among a method's recipes: train("spa", size="tiny", env="sudoku"). For a task of your own:
    `model` is a Hugging Face folder or hub id, `data` and `test` are files of rows, `template` is the prompt as a jinja
    text over the columns, `reward` a function and `env` an `Environment` class, each of both as `"file.py:name"` or as
    the object itself where other processes can import it. `overrides` are settings: {"stages.rl.steps": 50}.
    """
    rows = {"data": data, "test": test, "template": template}
    name, settings = _resolved(recipe, overrides or {}, reward, env, model=model, size=size, **rows)
    return _run(name, settings, None if run is None else Path(run))


def evaluate(
    model: str | Path,
    *,
    data: str | Path | None = None,
    reward: str | Callable[..., Any] | None = None,
    template: str | Path | None = None,
    env: str | type | None = None,
    run: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Score a Hugging Face folder, hub id or finished run on rows (or on an environment's test tasks), beside trivial
    policies.

    A run is asked as it evaluated itself, on its own held-out tasks where nothing else is given. Returns the table as
    the report shows it. Without `run` nothing else is kept.
    """
    from .text_model import model_folder

    path = Path(model)
    folder = model_folder(path) if path.exists() else model
    trained = path.exists() and (path / "config.yaml").is_file()
    own = _as_evaluated(path, data, reward, env, template) if trained else {}
    rows = {} if data is None or "env" in own else {"env.test": str(Path(data).absolute())}
    given = {**rows, **(overrides or {})}
    recipe, settings = _resolved(EVALUATION, given, reward, env, model=folder, template=template)
    settings = (*as_settings(own), *settings)
    if run is not None:
        return _run(recipe, settings, Path(run)).results["evaluate"]
    with tempfile.TemporaryDirectory(prefix="terrella-evaluate-") as scratch:
        return _run(recipe, settings, Path(scratch) / "run", kept=False).results["evaluate"]


def _as_evaluated(run: Path, data: Any, reward: Any, env: Any, template: Any) -> dict[str, Any]:
    """The settings by which a run on a task of the user's own evaluated itself, but for what is given; rows, rewards
    and code that it takes over must be those it was trained with.
    """
    from ..data.rows import rows_digest
    from .stages.verbs import require_same_files

    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    stage = next((stage for stage in reversed(config["stages"]) if stage["kind"] == "eval"), {})
    keys = [key for key in ("max_new_tokens", "temperatures", "samples", "n") if stage.get(key) is not None]
    asked = {"seed": config["seed"], "precision.params": config["precision"]["params"]}
    asked |= {f"stages.evaluate.{key}": stage[key] for key in keys}
    own = stage.get("env") or config.get("env") or {}
    if env is not None or own.get("kind") not in ("data", "path") or (own["kind"] == "path" and (data or reward)):
        return asked
    envs = [s.get("env") or config.get("env") or {} for s in config["stages"] if s["kind"] in ("sft", "rl")]
    # whose training rows are set beside those that are asked
    trained = dict(next((e for e in reversed(envs) if e.get("kind") == own["kind"] == "data"), own))
    left_out = [name for name, given in (("reward", reward), ("template", template)) if given]
    left_out += ["train", "test", "hold_out_every"] if data else []
    over = {key: value for key, value in own.items() if value != trained.get(key) and key not in left_out}
    trained |= {"reward": None} if reward else {}
    held_out = trained.get("test") is None
    if data:
        row_file = trained["train"]
        kept = row_file and Path(row_file).exists() and template is None
        known = (read_json(run / ROWS) or {}).get(row_file) if kept else None
        trained |= {"train": row_file if known and known == rows_digest(Path(row_file)) else None, "test": None}
    try:
        for plain in (trained, {**trained, **over}):
            kind: Any = EnvironmentSettings
            settings = schema.build(kind, schema.located(plain, str(run / "config.yaml")), "env")
            if isinstance(settings, DataEnvironment) and isinstance(settings.reward, ByPath):
                require_same_file(settings.reward.path, Path(), settings.reward.digest)
            require_same_files(settings, Run(run, ""))
    except ConfigError as error:
        raise ConfigError(f"{error}; to score by others give data or reward (--data, --reward)") from error
    if data:  # what the run held out of its rows stays held out, so the rows asked do not take its place
        (over if trained["train"] and held_out else trained)["test"] = str(Path(data).absolute())
    return {"env": trained, **({"stages.evaluate.env": over} if over else {}), **asked}


def _resolved(
    recipe: str | Path, overrides: Mapping[str, Any], reward: Any, env: Any, **options: str | Path | None
) -> tuple[str, tuple[str, ...]]:
    """The recipe that is meant, and its settings as on the command line."""
    words = {
        **{name: None if value is None else str(value) for name, value in options.items()},
        "reward": None if reward is None else path_of(reward),
        "env": None if env is None else path_of(env),
    }
    recipe = chosen_recipe(str(recipe), words)
    return recipe, (*settings_of(recipe, words), *as_settings(overrides))


def _run(recipe: str, settings: tuple[str, ...], run: Path | None, kept: bool = True) -> RunResult:
    """`terrella train` in this process: the ranks are processes of their own. A run that is not kept is not pointed
    to at its end.
    """
    from . import recipe as recipes
    from .commands.train import train as command

    if "terrella.rl.hosted.child" in sys.modules:
        raise ConfigError(
            "terrella.train: was called while your file was imported for its reward; put it below if __name__ == "
            "'__main__':"
        )
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "terrella.train: must be called from the main thread, which receives the signals to save and stop"
        )
    folder = run or run_folder(recipe, recipes.load(recipe, settings).name)
    words = [recipe, "--run", str(folder), *(word for setting in settings for word in ("--set", setting))]
    command.main(args=words, prog_name="terrella train", standalone_mode=False, obj={"kept": kept})
    results = {path.stem: read_json(path) for path in sorted((folder / "results").glob("*.json"))}
    exported = folder / "export"
    return RunResult(folder, results, read_json(folder / "summary.json"), exported if exported.is_dir() else None)
