"""`terrella recipes`: the recipes that ship, what each needs and shows; `--copy` writes one here to change it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import yaml

from ..core.errors import ConfigError
from ..core.files import write_atomic
from . import recipe as recipes

CATALOGUE = Path(__file__).parent / "catalogue.yaml"


def catalogue() -> dict[str, dict[str, Any]]:
    """Size, hardware, time where it was measured, and what it shows, of every recipe that ships."""
    return yaml.safe_load(CATALOGUE.read_text(encoding="utf-8"))


@click.command("recipes")
@click.argument("name", required=False)
@click.option("--copy", is_flag=True, help="Write NAME.yaml into this folder, to change it.")
@click.option("--all", "everything", is_flag=True, help="List the recipes for several GPUs too.")
def list_recipes(name: str | None, copy: bool, everything: bool) -> None:
    """List the recipes that ship, or show the one called NAME."""
    if name is None:
        if copy:
            raise ConfigError("--copy: name the recipe, e.g. terrella recipes demo --copy")
        _list(everything)
        return
    source = recipes.find(name)
    if not copy:
        click.echo(source.read_text(encoding="utf-8"), nl=False)
        return
    target = Path(source.name)
    if target.exists():
        raise ConfigError(f"{target}: exists already; move it away, or copy the recipe in another folder")
    write_atomic(target, source.read_text(encoding="utf-8"))
    click.echo(f"{target} is yours to change. To run it: terrella train {target}")


def _list(everything: bool) -> None:
    known = catalogue()
    shown = {name: about for name, about in known.items() if everything or "GPUs" not in about["hardware"]}
    click.echo(f"{'recipe':29}{'size':>7}  {'hardware':12} time")
    for name, about in shown.items():
        click.echo(f"{name:29}{about['size']:>7}  {about['hardware']:12} {about.get('time', '')}".rstrip())
        click.echo(f"    {about['shows']}")
    if len(shown) < len(known):
        click.echo(f"\nand {len(known) - len(shown)} for several GPUs: terrella recipes --all")
    click.echo("\nterrella train NAME          run it\nterrella recipes NAME --copy  write NAME.yaml here, to change it")
