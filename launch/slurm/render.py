"""Turns a recipe and job settings into sbatch scripts: one, a chain of dependent ones, or an array. Equal input,
equal bytes.
"""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import yaml

from ...core.config import check_layout, heads_fit
from ...core.errors import ConfigError
from ...rl.rollout.config import Vllm
from .. import recipe as recipes
from ..recipe import Recipe, Stage
from ..settings.base import OnPolicy, dealt_evenly, sampler_of
from .settings import SIGNAL_S, JobSettings, require_one_line, require_path

TEMPLATES = Path(__file__).parents[1] / "templates"
JOB_SHELL = TEMPLATES / "job.sh"  # what every script does about signals, requeue and crashes
EVERY_STAGE = "all"


@dataclass(frozen=True)
class Script:
    """One sbatch file. Scripts of a chain are submitted in order, each depending on the one before."""

    name: str
    text: str
    stages: tuple[str, ...]
    tasks: int  # of the array; 1 when it is none


@dataclass(frozen=True)
class Plan:
    """What is to be launched: the recipe with its overrides, where it runs, and how it is cut into jobs."""

    recipe: str
    run: str
    settings: JobSettings
    overrides: tuple[str, ...] = ()
    split_after: tuple[str, ...] = ()
    sweeps: tuple[str, ...] = ()
    parallel_tasks: int | None = None  # of the array at a time
    regenerate: str = "terrella launch"


def sweep_settings(sweeps: Sequence[str]) -> list[tuple[str, ...]]:
    """All combinations of `key=[a, b, ...]` lists, as overrides; the first key varies slowest."""
    axes: list[list[str]] = []
    for sweep in sweeps:
        key, equals, text = sweep.partition("=")
        try:
            values = yaml.safe_load(text) if equals else None
        except yaml.YAMLError:
            values = None
        if not key or not isinstance(values, list) or not values:
            raise ConfigError(f"--sweep {sweep}: write it as key=[value, value, ...]")
        axes.append([f"{key}={_flow(value)}" for value in values])
        if any(re.search(r"\s", item) for item in axes[-1]):
            raise ConfigError(f"--sweep {sweep}: a swept value must hold no blank")
    return list(itertools.product(*axes)) if axes else []


def _flow(value: object) -> str:
    """A value as YAML on one line, as --set reads it."""
    if isinstance(value, str):
        return value
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip().replace(", ", ",")


def cut(config: Recipe, split_after: Sequence[str]) -> list[tuple[str, ...]]:
    """The recipe's stages in groups, one job each."""
    names = [stage.name for stage in config.stages]
    ends = names if EVERY_STAGE in split_after else [*split_after, names[-1]]
    for name in ends:
        if name not in names:
            raise ConfigError(f"--split-after {name}: the recipe's stages are {', '.join(names)} (or 'all')")
    groups: list[tuple[str, ...]] = []
    group: list[str] = []
    for name in names:
        group.append(name)
        if name in ends:
            groups.append(tuple(group))
            group = []
    return groups


def check(config: Recipe, settings: JobSettings) -> None:
    """Refuse before submission what the ranks would refuse after an hour in the queue."""
    model, parallel = config.model, config.parallel
    if config.ranks % parallel.model_size:
        step = math.lcm(parallel.model_size, settings.world // settings.nodes) * settings.nodes // settings.world
        raise ConfigError(
            f"parallel: tensor {parallel.tensor} x pipeline {parallel.pipeline} x context {parallel.context} does not "
            f"divide the {config.ranks} ranks of {settings.nodes} nodes; use --nodes {step} or a multiple of it, or "
            "another layout"
        )
    # the tokenizer decides the vocabulary later; padding makes it divide
    check_layout(parallel, world=config.ranks, **{**model.cut, "vocab": parallel.tensor})
    if settings.rollout_nodes and not any(served(stage, config) for stage in config.stages):
        stage = next((s for s in config.stages if isinstance(s, OnPolicy)), config.stages[0])
        raise ConfigError(
            "--rollout-nodes: no stage of the recipe has vLLM servers of its own; "
            f"add --set 'stages.{stage.name}.rollouts={{sampler: {{kind: vllm}}}}', or leave the nodes out"
        )
    copies = config.ranks // parallel.model_size
    for stage in config.stages:
        for key in dict.fromkeys(("prompts_per_step", "sequences_per_step", *dealt_evenly(stage))):
            size = getattr(stage, key, None)
            if size is not None and size % copies:
                up, wider = -(-size // copies) * copies, parallel.tensor * copies // size
                fits = copies % size == 0 and heads_fit(wider, model.heads, model.kv_heads, model.head_dim)
                same = f"--set parallel.tensor={wider} (the batch stays), " if fits else ""
                raise ConfigError(
                    f"stages: {stage.name}.{key} = {size} is no multiple of the {copies} data-parallel ranks of "
                    f"{settings.nodes} nodes; use fewer nodes, {same}or --set stages.{stage.name}.{key}={up}"
                )


def served(stage: Stage, recipe: Recipe) -> bool:
    """Whether a stage samples from vLLM servers that the job must start."""
    sampler = sampler_of(stage, recipe.stages)
    return isinstance(sampler, Vllm) and not (sampler.urls or sampler.colocated)


def load(plan: Plan, extra: Sequence[str] = ()) -> Recipe:
    """The recipe as the job will see it: the overrides, and one rank for each place in the allocation."""
    given = [o for o in plan.overrides if o.partition("=")[0].strip() == "ranks"]
    if given:
        raise ConfigError(f"--set {given[-1]}: the allocation decides it; use --nodes and --gpus or --ranks-per-node")
    config = recipes.load(plan.recipe, (*plan.overrides, *extra, f"ranks={plan.settings.world}"))
    check(config, plan.settings)
    return config


def render(plan: Plan) -> list[Script]:
    """All scripts of a plan, checked against the recipe."""
    require_path("--run", plan.run)
    for option, texts in (("RECIPE", (plan.recipe,)), ("--set", plan.overrides), ("--sweep", plan.sweeps)):
        for text in texts:
            require_one_line(option, text)
    combinations = sweep_settings(plan.sweeps)
    if combinations and plan.settings.mixed:
        raise ConfigError(
            "--sweep: SLURM has no arrays of heterogeneous jobs; leave out --rollout-partition, -constraint and -gpus"
        )
    config = load(plan)
    for combination in combinations:
        load(plan, combination)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    template = environment.get_template("train.sbatch.j2")
    groups = cut(config, plan.split_after)
    scripts = []
    for number, stages in enumerate(groups, 1):
        name = re.sub(r"[^\w.-]", "-", config.name) + (f".{number}-{stages[-1]}" if len(groups) > 1 else "")
        settings = plan.settings
        if not any(served(stage, config) for stage in config.stages if stage.name in stages):
            settings = settings.without_samplers()
        text = template.render(
            title=_title(config, settings, stages, number, len(groups)),
            regenerate=plan.regenerate,
            name=name,
            s=settings,
            signal_s=SIGNAL_S,
            array=[shlex.quote(" ".join(f"--set {override}" for override in c)) for c in combinations],
            parallel_tasks=plan.parallel_tasks,
            run=shlex.quote(plan.run),
            venv=shlex.quote(settings.venv or ""),
            nodes=_trainer_nodes(settings),
            trainer_where=_trainer_where(settings),
            prefix=settings.command_prefix(),
            srun_extra="".join(f" {option}" for option in settings.srun_options()),
            command=_command(plan, settings, stages if number < len(groups) else None, bool(combinations)),
        )
        scripts.append(Script(name, text, stages, max(1, len(combinations))))
    return scripts


def _trainer_nodes(s: JobSettings) -> str:
    """The trainer's part of the nodes that the job got, so that `sbatch -N` can change how many these are."""
    if s.mixed:
        return str(s.nodes)
    return f"$((SLURM_JOB_NUM_NODES - {s.rollout_nodes}))" if s.rollout_nodes else "$SLURM_JOB_NUM_NODES"


def _trainer_where(s: JobSettings) -> str:
    """srun's choice of nodes for the trainer; with Ray one driver on the first, which has Ray start the rest."""
    if s.ray:
        return "--nodes=1 --ntasks=1"
    part = "--het-group=0 " if s.mixed else "--relative=0 " if s.rollout_nodes else ""
    return f'{part}--nodes="$nodes" --ntasks="$nodes"'


def _title(config: Recipe, s: JobSettings, stages: tuple[str, ...], number: int, total: int) -> str:
    size = f"{s.nodes} node{'s' if s.nodes > 1 else ''} x {s.ranks} rank{'s' if s.ranks > 1 else ''}"
    part = f", job {number} of {total}: {', '.join(stages)}" if total > 1 else ""
    samplers = f" and {s.rollout_nodes} for vLLM servers" if s.rollout_nodes else ""
    return f"{config.name} on {size}{samplers}{part}"


def _command(plan: Plan, settings: JobSettings, stages: tuple[str, ...] | None, array: bool) -> str:
    words = ["terrella", "train", plan.recipe]
    for override in plan.overrides:
        words += ["--set", override]
    command = shlex.join(words) + f' --set ranks=$((nodes * {settings.ranks})) --run "$run" --wait 120'
    if settings.ray:
        command += f' --ray --nodes "$nodes" --sampler-hosts {settings.rollout_nodes}'
    if stages:
        command += f" --until {shlex.quote(stages[-1])}"
    return command + (' "${setting[@]}"' if array else "") + ' "$@"'  # `sbatch SCRIPT --set ...` adds to it
