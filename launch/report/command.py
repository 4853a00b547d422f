"""`terrella report RUN...`: writes the report of a run, or of several compared."""

from __future__ import annotations

from pathlib import Path

import click

from . import build_report


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="File to write; default RUN/report.html, needed for several runs."
)
def report(runs: tuple[Path, ...], out: Path | None) -> None:
    """Write one offline HTML file about RUNS: result, curves, rollouts, warnings, settings. Works on a running run too."""
    click.echo(build_report(list(runs), out))
