"""`terrella check`: what a recipe would miss, before it is run; or whether an environment keeps its promises."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...core.errors import ConfigError, TerrellaError
from ...data.trajectory import Invalid
from .. import recipe as recipes
from ..recipe_files import run_folder
from ..task_options import chosen_recipe, own_options, require_own
from ..task_options import settings_of as own_settings

if TYPE_CHECKING:
    from ...core.health import Check
    from .check_preview import Shown


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="RECIPE | env NAME")
@own_options
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a setting; may be repeated.")
@click.option("--run", "folder", type=click.Path(path_type=Path), help="Where the run would lie; default runs/NAME.")
@click.option(
    "--rehearse",
    is_flag=True,
    help="Run it all, turned down: a small model of the same family, few tasks and steps, on the CPU.",
)
@click.option(
    "--layout",
    metavar="tp=2,pp=2",
    help="With --rehearse: at this layout (tp, pp, vpp, cp, ep, dp) in place of the recipe's own.",
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    help="With --rehearse: a folder to keep the rehearsal in; default: none is kept.",
)
def check(
    what: tuple[str, ...],
    overrides: tuple[str, ...],
    folder: Path | None,
    rehearse: bool,
    layout: str | None,
    keep: Path | None,
    **own: str | None,
) -> None:
    """Look for what would stop RECIPE, and show one prompt, an answer and its reward.

    `terrella check env my.py:Task` tests an environment of your own.
    """
    if layout and not rehearse:
        raise ConfigError("--layout: is for --rehearse; the recipe's own layout is its section parallel")
    if keep and not rehearse:
        raise ConfigError("--keep: is for --rehearse; nothing else writes anything")
    if what[0] == "env" and len(what) == 2:
        _environment(what[1], overrides)
        return
    if len(what) != 1:
        raise ConfigError(f"check {' '.join(what)}: write `terrella check RECIPE` or `terrella check env NAME`")
    if what[0] == "env" and not Path("env").exists():
        raise ConfigError("check env: which environment? write `terrella check env file.py:Name`")
    if ".py:" in what[0]:
        raise ConfigError(f"check {what[0]}: an environment is checked by `terrella check env {what[0]}`")
    recipe = chosen_recipe(what[0], own)
    config = recipes.load(recipe, (*own_settings(recipe, own), *overrides))
    require_own(recipe, config)
    if rehearse:
        _rehearse(config, layout, keep)
    else:
        _look(config, folder or run_folder(recipe, config.name))


def _environment(named: str, overrides: tuple[str, ...]) -> None:
    from .check_env import check_environment, settings_of

    for line in check_environment(settings_of(named, overrides)):
        click.echo(f"ok    {line}")
    click.echo(f"{named} keeps its promises")


def _look(config: recipes.Recipe, folder: Path) -> None:
    from .check_preview import preview
    from .check_recipe import alone, look, own_environments

    failed = _say(look(config, folder))
    if not failed:
        shown = preview(config, alone(config, folder))
        # after the first episode, whose faults are named: what hangs is not waited for twice
        if isinstance(shown, str) or not isinstance(shown.reward, Invalid):
            failed = _say(own_environments(config))
        _show(shown)
    if failed:
        raise TerrellaError(f"{failed} finding{'s' if failed > 1 else ''} to fix before {config.name} can run")


def _say(findings: Iterable[Check]) -> int:
    """Show findings as they come; how many failed."""
    failed = 0
    for finding in findings:
        click.echo(finding.line())
        failed += finding.level == "fail"
    return failed


def _show(shown: Shown | str) -> None:
    """One episode: the prompt as the model reads it, an answer, its reward."""
    from .check_preview import SHOWN

    if isinstance(shown, str):
        click.echo(f"note  {shown}")
        return
    cut = f"\n... ({len(shown.prompt) - SHOWN} more characters)" if len(shown.prompt) > SHOWN else ""
    tokens = "" if shown.prompt_tokens is None else f", {shown.prompt_tokens} tokens"
    click.echo(f"\nprompt{tokens}:\n{click.style(shown.prompt[:SHOWN] + cut, dim=True)}")
    click.echo(f"\nanswered {shown.how}:\n{click.style(shown.answer, dim=True)}")
    reward = f"Invalid: {shown.reward.reason}" if isinstance(shown.reward, Invalid) else f"{shown.reward:g}"
    click.echo(f"\nreward: {reward}" + (f", after {shown.turns} turns" if shown.turns > 1 else ""))
    if isinstance(shown.reward, Invalid):
        raise TerrellaError(f"the first episode has no reward: {shown.reward.reason}")


def _rehearse(config: recipes.Recipe, layout: str | None, keep: Path | None) -> None:
    from .. import rehearse
    from .check_recipe import require_room

    begun = time.monotonic()
    if keep and (keep / "run").exists():
        raise ConfigError(f"--keep {keep}: holds an earlier rehearsal, which would be taken for this one; name another")
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as scratch:
        place = keep or Path(scratch)
        require_room(config, place / "run")
        place.mkdir(parents=True, exist_ok=True)
        rehearsal = rehearse.turned_down(config, layout, place)
        for line in rehearse.describe_changes(config, rehearsal):
            click.echo(f"  {line}")
        ranks = rehearsal.settings["ranks"]
        many = f"{len(rehearsal.settings['stages'])} stages on {ranks} rank{'s' if ranks > 1 else ''}"
        click.echo(f"rehearsing {config.name}: {many} of the CPU")
        code, said = rehearse.run(rehearse.write(rehearsal, place), place / "run")
        took = time.monotonic() - begun
        if code == 0:
            click.echo(f"{config.name} went through in {took:.0f} s; nothing was learnt, and every stage ran")
            return
        failure = TerrellaError(
            f"the rehearsal of {config.name} failed after {took:.0f} s: {said}"
            + (f"; it lies in {keep}" if keep else "")
        )
        failure.exit_code = code if code > 0 else TerrellaError.exit_code
        raise failure
