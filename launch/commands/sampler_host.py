"""`terrella sampler-host FOLDER`: this machine lends itself to a run's samplers; started beside the trainer by a
cluster job.
"""

from __future__ import annotations

import signal
from pathlib import Path

import click

from ..nodes import count_gpus


@click.command("sampler-host")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--name", help="Name or address of this machine as the trainer sees it; default its host name.")
def sampler_host(folder: Path, name: str | None) -> None:
    """Leave this machine's address in FOLDER and start vLLM servers here when the trainer of a run asks, until ended
    by a signal.
    """
    lend(folder, name)


def lend(folder: Path, name: str | None) -> None:
    """Be a sampler host until a signal."""
    from ...rl.rollout.hosts import Host

    host = Host(name, count_gpus())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: host.stop())
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the scheduler's warning is for the trainer
    host.announce(folder)
    click.echo(f"sampler host {host.address.url} with {host.address.gpus} GPUs is ready")
    host.serve()
