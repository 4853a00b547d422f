"""`terrella train RECIPE`: all stages of a recipe in one run directory; the same command again resumes."""

from __future__ import annotations

from pathlib import Path

import click

from ..core import run as runs
from ..core import schema
from ..core.errors import TerrellaError
from ..core.files import read_json
from . import recipe as recipes
from .supervise import STOPPED, run_workers


@click.command()
@click.argument("recipe")
@click.option("--run", "folder", type=click.Path(path_type=Path), help="Run directory; default runs/RECIPE.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a setting, e.g. --set stages.1.steps=50.")
@click.option("--wait", type=float, default=0.0, help="Seconds to wait for a lease that a dead host left behind.")
@click.option("--dry-run", is_flag=True, help="Print the resolved settings and stages, and stop.")
def train(recipe: str, folder: Path | None, overrides: tuple[str, ...], wait: float, dry_run: bool) -> None:
    """Run RECIPE: the name of one that ships with terrella, or a YAML file."""
    config = recipes.load(recipe, overrides)
    folder = folder or Path("runs") / config.name
    if dry_run:
        click.echo(f"# run directory: {folder}\n# digest: {schema.digest(config)}\n{schema.dump(config)}", nl=False)
        return
    run, lease = runs.create(folder, config, wait)
    try:
        finished = [stage.name for stage in config.stages if run.outcome(stage.name) is not None]
        if len(finished) == len(config.stages):
            click.echo(f"{folder}: this run has finished; nothing to do (choose another --run folder to start anew)")
            _tell(folder)
            return
        if finished:
            click.echo(f"{folder}: resuming after {', '.join(finished)}")
        code = run_workers(run, config.ranks)
        if code == STOPPED:
            error = TerrellaError(f"{folder}: saved and stopped on request; run the same command to go on")
            error.exit_code = STOPPED
            raise error
        _report(folder)
        _tell(folder)
    finally:
        lease.release()


def _report(folder: Path) -> None:
    from .report import build_report

    build_report(folder)


def _tell(folder: Path) -> None:
    """What happened, in plain words, and where to look."""
    summary = read_json(folder / "summary.json")
    if summary:
        click.echo("\n" + "\n".join([summary["headline"], "", *summary["paragraphs"]]))
    click.echo(f"\nReport:  {folder / 'report.html'}\nMetrics: {folder / 'metrics.jsonl'}")
    if (folder / "export").is_dir():
        click.echo(f"Model:   {folder / 'export'} (a Hugging Face folder)")
