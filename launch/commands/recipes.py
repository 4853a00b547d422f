"""`terrella recipes`: the recipes that ship, what each needs and shows; `--copy` writes one here to change it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import yaml

from ...core.errors import ConfigError
from ...core.files import write_atomic
from ...core.schema import plain
from .. import recipe as recipes
from ..recipe_files import chosen, find, recipes_of

CATALOGUE = Path(__file__).parent.parent / "catalogue.yaml"


def catalogue() -> dict[str, dict[str, Any]]:
    """What every method that ships shows, and for each of its recipes by name: parameters, hardware, and time where
    it was measured.
    """
    return yaml.safe_load(CATALOGUE.read_text(encoding="utf-8"))


@click.command("recipes")
@click.argument("name", required=False)
@click.option("--size", help="Of a recipe that comes in several: tiny, gpu, 1gpu, paper ...")
@click.option("--env", help="Of a recipe that has several environments.")
@click.option("--copy", is_flag=True, help="Write NAME.yaml into this folder, to change it.")
def list_recipes(name: str | None, size: str | None, env: str | None, copy: bool) -> None:
    """List the recipes that ship, or show the one called NAME."""
    if name is None:
        if copy:
            raise ConfigError("--copy: name the recipe, e.g. terrella recipes demo --copy")
        _list()
        return
    name = chosen(name, size, env)
    text = _text(name)
    if not copy:
        click.echo(text, nl=False)
        return
    target = Path(f"{recipes.load(name).name}.yaml") if not name.endswith((".yaml", ".yml")) else Path(Path(name).name)
    if target.exists():
        raise ConfigError(f"{target}: exists already; move it away, or copy the recipe in another folder")
    write_atomic(target, text)
    click.echo(f"{target} is yours to change. To run it: terrella train {target}")


def _text(name: str) -> str:
    """A recipe as one file: as it was written, or where it is made of several, what they come to."""
    tree = recipes.settings_tree(name)
    if not isinstance(tree.value, dict):
        raise ConfigError(f"{name}: is no recipe, which is a mapping of settings")
    text = find(name).path.read_text(encoding="utf-8")
    if not {"base", "envs"} & yaml.safe_load(text).keys():
        return text
    return f"# {name}, made of several files of the project\n" + yaml.safe_dump(
        plain(tree), sort_keys=False, allow_unicode=True
    )


def _list() -> None:
    for method, about in catalogue().items():
        click.echo(f"{method:18} {about['shows']}")
        for stem, runs in about["sizes"].items():
            place = f"{runs['size']:>9}  {runs['hardware']:12} {runs.get('time', '')}".rstrip()
            env, _, size = stem.rpartition("-")
            words = "".join(f" --{option} {value}" for option, value in (("env", env), ("size", size)) if value)
            click.echo(f"  {words or ' ':37}{place}")
        envs = dict.fromkeys(place.env for place in recipes_of(method).values() if place.env)
        if envs:
            click.echo(f"   --env {', '.join(envs)}")
    click.echo("\nterrella train NAME [--size ... --env ...]    run it")
    click.echo("terrella recipes NAME --copy                  write NAME.yaml here, to change it")
