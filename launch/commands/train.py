"""`terrella train RECIPE`: all stages of a recipe in one run directory; the same command again resumes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import click

from ...core import run as runs
from ...core import schema
from ...core.errors import ConfigError, Stopped
from ...core.ports import free_port
from ...core.profile import PROFILE_VARIABLE
from ...core.secret import make_secret, read_secret
from .. import recipe as recipes
from ..extend import explain, extend, with_steps
from ..extras import require_packages
from ..nodes import GATHER_S, Place, choose_interface, gather, introduce, join, require_shared
from ..recipe_files import run_folder
from ..rewind import back_to as undo_to
from ..settings.verbs import Collect
from ..supervise import STOPPED, Span, run_workers
from ..task_options import chosen_recipe, own_options, require_own, settings_of


@click.command()
@click.argument("recipe")
@click.option(
    "--run",
    "folder",
    type=click.Path(path_type=Path),
    help="Run directory; default runs/RECIPE, or the run of a run's own config.yaml.",
)
@own_options
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a setting, e.g. --set stages.rlvr.steps=50."
)
@click.option(
    "--wait",
    type=float,
    default=0.0,
    help="Seconds to wait for an owner that is alive; a silent one is replaced after 30.",
)
@click.option("--until", metavar="STAGE", help="Stop after this stage; the same command without it goes on.")
@click.option(
    "--back-to",
    metavar="STAGE[:STEP]",
    help="Repeat from this stage, or its checkpoint of STEP; what lies beyond is set aside.",
)
@click.option(
    "--nodes",
    type=click.IntRange(1),
    default=1,
    envvar="TERRELLA_NODES",
    help="Machines of the run; each starts this command.",
)
@click.option(
    "--node-rank",
    type=int,
    default=0,
    envvar=["TERRELLA_NODE_RANK", "SLURM_NODEID"],
    help="Which of them this is, from 0.",
)
@click.option(
    "--coordinator", default=Place.coordinator, envvar="TERRELLA_COORDINATOR", help="host:port of the first machine."
)
@click.option(
    "--ray", is_flag=True, help="Let the Ray cluster of this machine, or of RAY_ADDRESS, place --nodes machines."
)
@click.option(
    "--sampler-hosts",
    type=click.IntRange(0),
    default=0,
    help="With --ray: further machines for the run's vLLM servers.",
)
@click.option(
    "--replay", type=click.Path(path_type=Path), metavar="RUN", help="Train on the rollouts of this finished run again."
)
@click.option(
    "--profile",
    is_flag=True,
    help="Trace the fourth and fifth step of every rank into RUN/profile (chrome://tracing; NVTX ranges for nsys).",
)
@click.option(
    "--steps",
    multiple=True,
    metavar="[STAGE=]N",
    help="Train RL stages to step N; a finished run goes on from where it ended.",
)
@click.option("--dry-run", is_flag=True, help="Print the resolved settings and stages, and stop.")
def train(
    recipe: str,
    folder: Path | None,
    overrides: tuple[str, ...],
    wait: float,
    until: str | None,
    back_to: str | None,
    nodes: int,
    node_rank: int,
    coordinator: str,
    ray: bool,
    sampler_hosts: int,
    replay: Path | None,
    profile: bool,
    steps: tuple[str, ...],
    dry_run: bool,
    **own: str | None,
) -> None:
    """Run RECIPE: the name of one that ships with terrella (`terrella recipes` lists them), or a YAML file.

    On a task of your own: terrella train grpo --model FOLDER --data FILE --reward FILE.py:NAME
    """
    recipe = chosen_recipe(recipe, own)
    overrides = (*settings_of(recipe, own), *overrides)
    config = with_steps(recipes.load(recipe, overrides), steps)
    if replay is not None:
        config = replaying(config, replay)
    folder = folder or run_folder(recipe, config.name)
    names = [stage.name for stage in config.stages]
    if until is not None and until not in names:
        raise ConfigError(f"--until {until}: the recipe's stages are {', '.join(names)}")
    place = Place(node_rank if nodes > 1 else 0, nodes, coordinator)
    here = place.ranks_here(config.ranks)
    if dry_run:
        click.echo(f"# run directory: {folder}\n# digest: {schema.digest(config)}\n{schema.dump(config)}", nl=False)
        return
    require_own(recipe, config)
    require_packages(config)
    click.get_current_context().with_resource(_early_stop(folder))
    if profile:
        os.environ[PROFILE_VARIABLE] = str(folder.absolute() / "profile")  # the ranks inherit it
    if sampler_hosts and not ray:
        raise ConfigError("--sampler-hosts: needs --ray, which places them")
    if ray and back_to is not None:
        raise ConfigError("--back-to: go back without --ray first, with --until the stage before")
    if ray:
        options = [*(("--set", text) for text in overrides), *(("--steps", text) for text in steps)]
        options += [("--until", until)] if until else []
        options += [("--replay", str(replay.absolute()))] if replay else []
        words = [word for option in options for word in option] + (["--profile"] if profile else [])
        _raise_if_stopped(folder, _on_ray(recipe, folder, nodes, sampler_hosts, words))
        return
    me = introduce(place, schema.digest(config)) if nodes > 1 else {}
    if not place.leads:
        answer = join(place, me, read_secret(folder, wait + GATHER_S), wait + GATHER_S)
        if answer["done"]:
            return
        require_shared(folder, answer["token"])
        click.echo(f"node {place.node} ({me['host']}): {choose_interface(me['address'])}")
        span = Span(place.node * here, here, config.ranks, place.host, answer["port"])
        _raise_if_stopped(folder, run_workers(runs.Run(folder, answer["token"]), span, until, _is_kept()))
        return
    longer = extend(folder, config, wait) if steps else []
    if longer:
        click.echo(explain(folder, longer))
    run, lease = runs.create(folder, config, wait)
    try:
        if back_to is not None and (aside := undo_to(run, names, back_to)):
            click.echo(f"{folder}: going back to {back_to}; what was beyond it lies in {aside}")
        for warning in run.verify(names):
            click.echo(f"warning: {warning}", err=True)
        finished = [name for name in names if run.outcome(name) is not None]
        done = len(finished) == len(names) or until in finished
        span = Span(0, here, config.ranks, place.host if nodes > 1 else "127.0.0.1", free_port())
        if nodes > 1:
            gather(place, me, {"token": run.token, "port": span.port, "done": done}, make_secret(folder))
            click.echo(f"node 0 ({me['host']}): {choose_interface(me['address'])}")
        if done:
            what = "this run" if len(finished) == len(names) else f"stage {until}"
            click.echo(f"{folder}: {what} has finished; nothing to do (choose another --run folder to start anew)")
            if len(finished) == len(names) and not (folder / "report.html").exists():
                _report(folder)  # the start that finished was stopped before it wrote one
            _tell(folder)
            return
        if finished:
            click.echo(f"{folder}: resuming after {', '.join(finished)}")
        ranks = f"{config.ranks} rank{'s' if config.ranks > 1 else ''}"
        click.echo(f"{config.name}: {len(names)} stages, {ranks}; loading torch and Megatron (about 10 s)")
        _raise_if_stopped(folder, run_workers(run, span, until, _is_kept()))
        _report(folder)
        _tell(folder)
    finally:
        lease.release()


def replaying(config: recipes.Recipe, run: Path) -> recipes.Recipe:
    """The recipe with every RL stage on the journal that the same stage of `run` kept."""
    stages = []
    for stage in config.stages:
        rollouts = getattr(stage, "rollouts", None)
        if rollouts is not None and not (isinstance(stage, Collect) and stage.model is None):
            journal = run / "stages" / stage.name / "journal"
            if not any(journal.glob("samples-*.jsonl")):
                raise ConfigError(
                    f"--replay {run}: {journal} holds no rollouts; train with --set "
                    f"stages.{stage.name}.rollouts.keep_samples=true"
                )
            stage = replace(stage, rollouts=replace(rollouts, replay=str(journal.absolute())))
        stages.append(stage)
    if stages == list(config.stages):
        raise ConfigError(f"--replay {run}: no stage of this recipe samples")
    return replace(config, stages=stages)


def _on_ray(recipe: str, folder: Path, nodes: int, sampler_hosts: int, options: list[str]) -> int:
    from ..on_ray import RayJob, run_on_ray

    recipe = str(Path(recipe).absolute()) if Path(recipe).is_file() else recipe
    words = ("train", recipe, "--run", str(folder.absolute()), "--wait", "120", *options)
    return run_on_ray(RayJob(words, folder, nodes, sampler_hosts), click.echo)


@contextmanager
def _early_stop(folder: Path) -> Iterator[None]:
    """A request to stop outside of the stages ends the command as one within them does. A container's first process
    would ignore it.
    """

    def stop(_number: int, _frame: object) -> None:
        _raise_if_stopped(folder, STOPPED)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGUSR1)}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, before)  # who started us may have blocked them
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_kept() -> bool:
    """Whether the run's folder stays; that of a terrella.evaluate without `run` does not."""
    context = click.get_current_context(silent=True)
    asked: dict[str, bool] = (context and context.obj) or {}
    return asked.get("kept", True)


def _raise_if_stopped(folder: Path, code: int) -> None:
    if code != STOPPED:
        return
    if not _is_kept():
        raise Stopped("stopped on request; nothing of it is kept")
    if not runs.has_begun(folder):
        raise Stopped(f"{folder}: stopped on request before anything was done; run the same command to begin")
    raise Stopped(f"{folder}: saved and stopped on request; run the same command to go on")


def _report(folder: Path) -> None:
    from ..report import build_report

    build_report(folder)


def _tell(folder: Path) -> None:
    """What happened, in plain words, and where to look. A rehearsal's folder goes with it, and its model learnt
    nothing.
    """
    from ..rehearse import REHEARSAL_VARIABLE
    from ..terminal import ending

    if os.environ.get(REHEARSAL_VARIABLE):
        return

    click.echo("\n" + ending(folder, _is_kept()))
