"""`terrella launch RECIPE`: a recipe on a SLURM cluster. Renders sbatch scripts a person can read, checks, submits,
follows.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import click

from ...core.errors import TerrellaError
from ...core.run import require_ours, require_same_settings
from .. import recipe as recipes
from ..recipe_files import chosen, run_folder
from ..slurm import cluster
from ..slurm import submit as jobs
from ..slurm.render import JOB_SHELL, Plan, load, render, sweep_settings
from ..slurm.settings import RESTARTS, JobSettings
from ..task_options import require_own


def _print_job_shell(context: click.Context, _option: click.Parameter, asked: bool) -> None:
    if asked:
        click.echo(JOB_SHELL)
        context.exit()


@click.command()
@click.argument("recipe")
@click.option("--size", help="Of a recipe that comes in several: tiny, gpu, 1gpu, paper ...")
@click.option("--env", help="Of a recipe that has several environments.")
@click.option("--nodes", type=int, default=1, help="Nodes of the allocation.")
@click.option("--partition", "-p", help="SLURM partition; default: the cluster's.")
@click.option("--account", "-A", help="SLURM account.")
@click.option("--qos", help="SLURM quality of service.")
@click.option("--time", default="4:00:00", help="Limit of one start; the job requeues itself until done.")
@click.option("--gpus", type=int, default=8, help="GPUs of each node; 0 trains on the CPU.")
@click.option("--ranks-per-node", type=int, help="Processes on each node; default one on each GPU.")
@click.option("--cpus", type=int, help="CPUs of each node; default what the partition gives.")
@click.option("--constraint", help="SLURM node feature.")
@click.option("--interface", help="Network interface of rendezvous and gloo, e.g. ib0.")
@click.option("--venv", help="Virtual environment to activate on the nodes.")
@click.option("--container", help="Container image with terrella inside.")
@click.option("--runtime", type=click.Choice(["pyxis", "apptainer"]), default="pyxis", help="What runs the container.")
@click.option("--mount", "mounts", multiple=True, metavar="FROM:TO", help="Folder to mount into the container.")
@click.option("--setup", multiple=True, metavar="LINE", help="Shell line before the start, e.g. 'module load cuda'.")
@click.option("--sbatch", multiple=True, metavar="OPTION", help="Further option of sbatch, e.g. --sbatch=--exclude=n7.")
@click.option("--check-gpus", is_flag=True, help="First look at every node's GPUs: memory errors, Xid errors, DCGM.")
@click.option("--rollout-nodes", type=int, default=0, help="Nodes beside the trainer's for vLLM servers.")
@click.option("--rollout-partition", help="Partition of those nodes; makes the job heterogeneous.")
@click.option("--rollout-constraint", help="Node feature of those nodes; likewise.")
@click.option("--rollout-gpus", type=int, help="GPUs of each of those nodes; likewise.")
@click.option("--ray", is_flag=True, help="Start a Ray cluster in the allocation and let it place trainer and servers.")
@click.option("--restarts", type=int, default=RESTARTS, help="Requeues after crashes; time limits do not count.")
@click.option("--run", "folder", help="Run directory on a shared file system; default runs/RECIPE.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a setting of the recipe.")
@click.option(
    "--split-after",
    multiple=True,
    metavar="STAGE",
    help="End a job after this stage and chain the next; 'all' for every stage.",
)
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    metavar="KEY=[A,B]",
    help="One array task for each value; several give all combinations.",
)
@click.option("--at-once", type=click.IntRange(1), help="Array tasks that run at the same time.")
@click.option("--dry-run", is_flag=True, help="Print the scripts and stop; needs no SLURM.")
@click.option("--job-shell", is_flag=True, is_eager=True, expose_value=False, hidden=True, callback=_print_job_shell)
@click.option("--follow", is_flag=True, help="Print the jobs' states and logs until they end.")
def launch(
    recipe: str,
    folder: str | None,
    overrides: tuple[str, ...],
    split_after: tuple[str, ...],
    sweeps: tuple[str, ...],
    **options: Any,
) -> None:
    """Run RECIPE on a SLURM cluster."""
    dry_run, follow, at_once = options.pop("dry_run"), options.pop("follow"), options.pop("at_once")
    recipe = chosen(recipe, options.pop("size"), options.pop("env"))
    settings = JobSettings(**options)
    own = "" if sweeps else recipe  # the tasks of an array get folders of their own, which are none of a run's
    run = folder or str(run_folder(own, recipes.load(recipe, overrides).name))
    # a printed script may run elsewhere; one that is submitted here has one place
    place = run if dry_run else os.path.abspath(run)
    plan = Plan(recipe, place, settings, overrides, split_after, sweeps, at_once, command_line())
    scripts = render(plan)
    if dry_run:
        click.echo("\n".join(script.text for script in scripts), nl=False)
        return
    logs = Path(place) / "logs"
    unchecked = cluster.check_all(settings, Path(place), logs, [script.text for script in scripts])
    for note in filter(None, (unchecked, check_inputs(plan))):
        click.echo(f"note: {note}")
    submitted = jobs.submit(scripts, jobs.write_scripts(scripts, logs), logs)
    for job, script in zip(submitted, scripts, strict=True):
        tasks = f", {job.tasks} tasks" if job.tasks > 1 else ""
        click.echo(f"job {job.job}: {', '.join(script.stages)}{tasks}; script {job.script}, log {job.log}")
    if not follow:
        click.echo(f"terrella report {run} --live   # to see it train")
        return
    for job in submitted:
        code = jobs.follow(job, click.echo)
        if code:
            error = TerrellaError(f"job {job.job} ended with code {code}; its log is {job.log}")
            error.exit_code = code
            raise error


def check_inputs(plan: Plan) -> str | None:
    """Folders, files and tags that a stage would miss only after the queue are missed now, and a run folder of other
    settings is found. Returns what could not be checked here.
    """
    swept = [(f"{task:03d}", settings) for task, settings in enumerate(sweep_settings(plan.sweeps))]
    runs = {Path(plan.run, task): load(plan, settings) for task, settings in swept or [("", ())]}
    folder, recipe = next(iter(runs.items()))
    require_own(plan.recipe, recipe, by_settings=True)
    if plan.settings.container:
        return "folders and data are not checked: the container may have them elsewhere"
    from ..worker import check_stages
    from .check_recipe import alone

    for place, settings in runs.items():
        require_ours(place)
        require_same_settings(place, settings)
    try:
        check_stages(recipe.stages, alone(recipe, folder))  # of an array the first task
    except ImportError as error:
        return f"folders and data are not checked: {error.name} is not installed on this machine"
    return None


def command_line() -> str:
    """The command as it was typed, without what only concerns this terminal."""
    context = click.get_current_context()
    words = ["terrella", "launch", context.params["recipe"]]
    for option in context.command.params:
        value = context.params.get(option.name or "")
        # not `in`: 0 GPUs are a choice
        left_alone = value is None or value is False or value == () or value == option.default
        if not isinstance(option, click.Option) or option.name in ("dry_run", "follow") or left_alone:
            continue
        flag = option.opts[0]
        if option.is_flag:
            words.append(flag)
            continue
        for item in list(value or ()) if option.multiple else [value]:
            words += [flag, str(item)]
    return shlex.join(words)
