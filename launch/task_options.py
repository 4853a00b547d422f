"""What a user brings to `terrella train grpo|ppo|sft`: options that are laid into the recipe as settings."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from ..core.by_path import existing
from ..core.errors import ConfigError
from ..rl.own.config import DataEnvironment
from . import recipe as recipes
from .recipe_files import chosen, comes_in_several

KEYS = {
    "model": "model.folder",
    "data": "env.train",
    "test": "env.test",
    "reward": "env.reward",
    "template": "env.template",
}
OF_ROWS = ("data", "test", "reward", "template")  # what an environment of one's own brings itself
GENERIC = ("grpo", "ppo", "sft")
OPTIONS = {
    "model": ("FOLDER", "a Hugging Face folder, or owner/name of the hub."),
    "data": ("FILE", "rows to train on: JSONL, JSON, parquet, a folder of them, or shards."),
    "test": ("FILE", "rows to evaluate on; default: every tenth row of --data."),
    "reward": ("FILE.py:NAME", "a function of prompt, answer and info; or exact, contains, number."),
    "template": ("JINJA", "the prompt as a jinja text over the columns, or a file of it."),
    "env": (
        "FILE.py:NAME",
        "an Environment of your own, in place of --data and --reward. Other recipes: one of theirs, by name.",
    ),
}
EVALUATION = "parts/evaluate"  # what terrella.evaluate runs


def own_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a user's own task, for a command line; they come as keyword arguments of these names."""
    for name, (metavar, about) in reversed(OPTIONS.items()):
        command = click.option(f"--{name}", metavar=metavar, help=f"{', '.join(GENERIC)}: {about}")(command)
    return click.option("--size", help="Of a recipe that comes in several: tiny, gpu, 1gpu, paper ...")(command)


def chosen_recipe(recipe: str, options: dict[str, str | None]) -> str:
    """The recipe that the options --size and --env choose among those of a method; both are taken out of the
    options.
    """
    size = options.pop("size", None)
    return chosen(recipe, size, options.pop("env", None) if comes_in_several(recipe) else None)


def settings_of(recipe: str, options: Mapping[str, str | None]) -> tuple[str, ...]:
    """The options model, data, test, reward, template and env as `key=value` settings of the recipe, which must have
    an environment.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if not given:
        return ()
    if not recipes.has_environment(recipe):
        name = next(iter(given))
        raise ConfigError(
            f"--{name}: {recipe} trains on a task of its own; --{name} is an option of the recipes "
            f"{', '.join(GENERIC)}, and of your own recipes with a section env"
        )
    clash = next((name for name in OF_ROWS if name in given and "env" in given), None)
    if clash is not None:
        raise ConfigError(
            f"--{clash}: the environment {given['env']} gives its own tasks and scores; leave out --{clash} or --env"
        )
    made = {"env": {"kind": whole_path(given["env"])}} if "env" in given else {}
    return as_settings({**made, **{key: whole_path(given[name]) for name, key in KEYS.items() if name in given}})


def as_settings(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Values by their keys, as `--set` takes them."""
    return tuple(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items())


def require_own(recipe: str, config: recipes.Recipe, by_settings: bool = False) -> None:
    """Refuse a recipe for any task before it starts without one, naming the options that give it, or the settings; a
    copy of the recipe may be changed to need no model, and is not looked at.
    """
    if recipe not in (*GENERIC, EVALUATION):
        return
    env = config.env
    rows = env if isinstance(env, DataEnvironment) else None
    needed = [
        ("--model FOLDER", "model.folder=FOLDER", config.model.folder),
        (
            "--data FILE (or --env FILE.py:NAME)",
            "env.train=FILE (or env.kind=FILE.py:NAME)",
            env if rows is None else rows.train or rows.test,
        ),
        ("--reward FILE.py:NAME", "env.reward=FILE.py:NAME", env if rows is None else rows.reward),
    ]
    missing = [f"--set {setting}" if by_settings else option for option, setting, value in needed if value is None]
    if missing:
        what = "rows: are of your own" if recipe == EVALUATION else f"{recipe}: trains on a task of your own"
        raise ConfigError(f"{what}; add {' and '.join(missing)}")


def whole_path(text: str) -> str:
    """A file or folder by its whole path, also the one of `file.py:Name`, so that the run can be resumed from any
    folder.
    """
    file, colon, name = text.rpartition(":") if ".py:" in text else (text, "", "")
    path = existing(file)
    return text if path is None else f"{path.resolve()}{colon}{name}"


def path_of(value: str | Callable[..., Any]) -> str:
    """How a function or class is named in a recipe: it runs in processes of its own, which must be able to import
    it.
    """
    if isinstance(value, str):
        return value
    name, module = getattr(value, "__qualname__", None), inspect.getmodule(value)
    if name is None:
        hint = "give its class, and its arguments in overrides as env.NAME"
        raise ConfigError(f"an object of {type(value).__name__} cannot be imported by other processes; {hint}")
    file = getattr(module, "__file__", None)
    if module is None or file is None or not Path(file).is_file():
        hint = f"write it to a file and give that as 'file.py:{name}'"
        raise ConfigError(
            f"{name}: is defined in a notebook or at a prompt, where other processes cannot import it; {hint}"
        )
    if getattr(module, name, None) is not value:
        raise ConfigError(
            f"{name}: is not a name at the top of {file}, so other processes cannot import it; define it there"
        )
    packaged = "." in module.__name__ and module.__name__ != "__main__"
    return f"{module.__name__ if packaged else Path(file).resolve()}:{name}"
