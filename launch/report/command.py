"""`terrella report RUN...`: writes the report of a run, or of several compared; with --live a running one is
followed in the terminal.
"""

from __future__ import annotations

from pathlib import Path

import click

from ...core.errors import ConfigError


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write; default RUN/report.html, needed for several runs.",
)
@click.option(
    "--live",
    is_flag=True,
    help="Follow one run in the terminal until it ends or you press Ctrl-C; it is not disturbed.",
)
@click.option("--once", is_flag=True, help="--live: print the state once and stop; so does output that is no terminal.")
@click.option("--every", default=2.0, type=click.FloatRange(0.1, 3600), help="--live: seconds between two looks.")
@click.option(
    "--give-up", default=1800.0, type=click.FloatRange(1), help="--live: stop after so many seconds without a record."
)
def report(runs: tuple[Path, ...], out: Path | None, live: bool, once: bool, every: float, give_up: float) -> None:
    """Write one offline HTML file about RUNS: result, curves, rollouts, warnings, settings. Works on a running run
    too.
    """
    if live:
        from ..commands.watch import watch

        run, *others = runs
        if others:
            raise ConfigError("--live follows one run; name one")
        watch(run, once, every, give_up)
        return
    from . import build_report

    click.echo(build_report(list(runs), out))
