"""`terrella plan`: what a model costs on a cluster, which layout is best and why, how it scales, and how far to
trust the numbers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ...core import schema
from ...core.errors import ConfigError
from ...core.progress import clock
from ...models.config import ModelConfig
from ...models.geometry import GEOMETRIES, count
from ...models.hub import pin, sizes_of
from .. import recipe as recipes
from ..recipe import Recipe
from ..recipe_files import methods, shipped
from .layout import Layout, Work, impossible
from .machine import GPUS, PUBLISHED, Constants
from .measured import expert_steps
from .memory import memory, too_large
from .of_recipe import Trained, trained
from .published import RL_ROWS, ROWS, left_out, mean_error
from .rl import Rollout, once_lines, rl_lines, rl_step
from .search import Candidate, explain, search
from .simulate import FAILURES_PER_GPU_DAY, outlook, restart_seconds, save_seconds, start_seconds
from .timing import fitted, step_time

DEFAULT = "llama3-8b"
SIMULATED = (1024, 2048, 4096, 8192, 16384)


@click.command()
@click.argument("name", metavar="[MODEL]", required=False)
@click.option(
    "--model", "folder", metavar="FOLDER", help="Hugging Face folder or hub id whose sizes count, a recipe's included."
)
@click.option("--nodes", type=click.IntRange(1), help="Nodes of the cluster; default 1, or the ranks of the recipe.")
@click.option("--gpus", type=click.IntRange(1), help="GPUs in all, when it is not whole nodes.")
@click.option("--gpu", "kind", type=click.Choice(list(GPUS)), default="h100", help="Kind of GPU.")
@click.option("--sequence", type=click.IntRange(1), help="Tokens of a sequence; default 4096, or the recipe's.")
@click.option("--batch", type=click.IntRange(1), help="Sequences of an optimizer step; default 256, or the recipe's.")
@click.option("--precision", type=click.Choice(["bf16", "fp8"]), help="Default bf16, or the recipe's.")
@click.option(
    "--cache-tokens",
    type=click.IntRange(0),
    default=0,
    help="Tokens in the key-value cache of a sampler on the same GPUs.",
)
@click.option(
    "--layout",
    "wanted",
    metavar="T,P,V,C,E,M",
    help="Judge one layout: tensor,pipeline,virtual,context,expert,microbatch.",
)
@click.option(
    "--samples", type=click.IntRange(1), help="Samples of a step of RL: what sampling and weight sync cost is added."
)
@click.option("--prompt-tokens", type=click.IntRange(1), help="Tokens of a prompt; default 512.")
@click.option(
    "--new-tokens", type=click.IntRange(1), help="Sampled tokens of a trajectory, on average; default 512, or the most."
)
@click.option("--most-tokens", type=click.IntRange(0), default=0, help="Of the longest one; default: as the average.")
@click.option(
    "--sampler-gpus", type=click.IntRange(0), help="GPUs that only sample; default: the trainer's take turns."
)
@click.option("--sampler-tensor", type=click.IntRange(1), help="GPUs that share one sampler's model.")
@click.option(
    "--refit",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="CSV",
    help="Rows of `terrella bench cluster` that decide constants; without MODEL: how well they are met.",
)
@click.option("--top", type=click.IntRange(1), default=5, help="Layouts to print.")
@click.option("--simulate", is_flag=True, help="Scale the best layout to 1,024 - 16,384 GPUs with failures.")
@click.option("--published", is_flag=True, help="Print predicted beside published figures, and the error.")
def plan(
    name: str | None,
    folder: str | None,
    nodes: int | None,
    gpus: int | None,
    kind: str,
    sequence: int | None,
    batch: int | None,
    precision: str | None,
    cache_tokens: int,
    wanted: str | None,
    samples: int | None,
    prompt_tokens: int | None,
    new_tokens: int | None,
    most_tokens: int,
    sampler_gpus: int | None,
    sampler_tensor: int | None,
    refit: Path | None,
    top: int,
    simulate: bool,
    published: bool,
) -> None:
    """Plan MODEL: a size by name (see --published for some), a Hugging Face folder, or a recipe, whose own sizes,
    layout and stages count where no option says otherwise.
    """
    if published:
        click.echo("\n".join([*published_table(), *published_rl_table()]))
        return
    constants = None
    if refit:
        from . import refit as measured  # with the benchmarks, which not every installation has

        seen = measured.read(refit)
        if name is None and folder is None:
            click.echo("\n".join([*measured.refit_table(seen), *measured.beside_published(refit)]))
            return
        constants, names = measured.refit(seen)
        click.echo(f"by {refit}, {len(seen)} rows, which decide {', '.join(names)}")
    gpu = GPUS[kind]
    model, recipe = target(name, folder)
    asked: dict[str, Any] = {"samples": samples, "prompt": prompt_tokens, "new": new_tokens}
    asked |= {"gpus": sampler_gpus, "tensor": sampler_tensor, "most": most_tokens}
    asked = {key: value for key, value in asked.items() if value is not None}
    if recipe is not None and not (nodes or gpus or wanted or sequence or batch):
        if simulate:
            raise ConfigError(
                "--simulate: scales one layout; name the cluster with --nodes, or the layout with --layout"
            )
        alike: dict[tuple[str, ...], list[str]] = {}
        for stage in trained(recipe, prompt_tokens, new_tokens):
            alike.setdefault(tuple(stage_lines(stage, kind, asked, precision, constants)), []).append(stage.name)
        if not alike:
            raise ConfigError(f"{name}: no stage trains; say what with --sequence and --batch")
        for lines, names in alike.items():
            click.echo(f"{', '.join(names)}: " + "\n  ".join(lines))
        return
    gpus = gpus or (nodes or 1) * gpu.gpus_per_node
    work = Work(model, sequence or 4096, batch or 256, precision or "bf16")  # type: ignore[arg-type]
    rollout = Rollout(**asked) if samples else None
    if rollout and (rollout.gpus or gpus) % rollout.tensor:
        raise ConfigError(
            f"--sampler-tensor: {rollout.tensor} does not divide the {rollout.gpus or gpus} GPUs that sample"
        )
    counts = count(work.model)
    click.echo(
        f"{folder or name or DEFAULT}: {counts.total / 1e9:.2f} B parameters, {counts.active / 1e9:.2f} B in a token's "
        f"matmuls; {work.batch} x {work.sequence} tokens a step, {work.precision}, on {gpus} x {gpu.name}"
    )
    if wanted:
        layout = _parse(wanted, gpus)
        _judge(work, layout, kind, cache_tokens, constants)
        _echo_rl(work, layout, rollout, kind, constants)
        if simulate:
            click.echo("\n".join(simulated_table(work, layout, kind, constants)))
        return
    found = search(work, gpus, gpu, cache_tokens, constants)
    tried = len(found.fitting) + len(found.refused)
    reasons = ", ".join(f"{kind} {n}" for kind, n in found.reasons().items())
    click.echo(f"{tried} layouts tried, {len(found.fitting)} fit; ruled out by: {reasons or 'nothing'}")
    if not found.fitting:
        layout, reason = min(found.refused, key=lambda pair: (not pair[1].startswith("memory"), pair[0].microbatch))
        raise ConfigError(
            f"no layout fits; the nearest, {layout.text()}, fails: {reason}. Take more GPUs, a shorter sequence or fp8"
        )
    for number, candidate in enumerate(found.fitting[:top], 1):
        click.echo(f"{number}. {_line(candidate, kind)}")
    best = found.fitting[0]
    click.echo("why the first:")
    for line in explain(best, found):
        click.echo(f"  {line}")
    click.echo(
        "memory of its fullest GPU: " + ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in best.memory.table())
    )
    click.echo(f"in a recipe: {schema.to_plain(best.layout.settings())}")
    _echo_rl(work, best.layout, rollout, kind, constants)
    if simulate:
        click.echo("\n".join(simulated_table(work, best.layout, kind, constants)))


def target(name: str | None, folder: str | None = None) -> tuple[ModelConfig, Recipe | None]:
    """The sizes of a model by name, of a Hugging Face folder or out of a recipe, and the recipe."""
    if name is None:
        return (sizes_of(pin(folder)) if folder else GEOMETRIES[DEFAULT]), None
    if name in shipped() or name in methods() or name.endswith((".yaml", ".yml")):
        recipe = recipes.load(name, (f"model.folder={folder}",) if folder else ())
        return recipe.model.sizes, recipe
    if folder:
        raise ConfigError(f"--model {folder}: '{name}' is no recipe; leave one of them out")
    if name.lower() in GEOMETRIES:
        return GEOMETRIES[name.lower()], None
    if "/" in name or Path(name).is_dir():
        return sizes_of(pin(name)), None
    raise ConfigError(
        f"'{name}' is no model size, no folder and no recipe; sizes: {', '.join(GEOMETRIES)}; recipes: "
        f"{', '.join(shipped())}"
    )


def stage_lines(
    stage: Trained, kind: str, asked: dict[str, Any], precision: str | None, constants: Constants | None = None
) -> list[str]:
    """A training stage of a recipe on the layout and with the sizes that it has."""
    gpu, layout, tokens = GPUS[kind], stage.layout, stage.microbatch_tokens
    work = replace(stage.work, precision=precision) if precision else stage.work  # type: ignore[arg-type]
    used = memory(replace(work, sequence=tokens, batch=layout.data), replace(layout, microbatch=1))
    parts = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in used.table())
    cut = layout.text().replace(f" MBS{layout.microbatch}", "")
    lines = [
        f"{cut} on {layout.gpus} x {gpu.name}, {tokens:,} tokens at a time",
        f"memory of its fullest GPU: {parts}",
    ]
    if stage.rollout:
        rollout = replace(stage.rollout, **asked)
        step = rl_step(work, layout, rollout, gpu, constants)
        seconds = step.total
        lines += rl_lines(step, rollout, stage.save_every)
    else:
        time = step_time(work, layout, gpu, constants)
        seconds = time.total
        lines.append(
            f"a step of {work.batch} sequences of at most {work.sequence:,} tokens: {seconds:.2f} s, "
            f"{time.tokens_per_s:,.0f} tokens/s/GPU, MFU {100 * time.mfu(gpu):.0f} %"
        )
        start, restart = start_seconds(work, gpu, layout), restart_seconds(work, gpu, layout)
        lines += once_lines(
            layout.gpus, seconds, save_seconds(work, gpu, layout.gpus), stage.save_every, start, restart
        )
    if stage.steps:
        lines.append(f"{stage.steps:,} steps take {clock(stage.steps * seconds)}")
    if reason := too_large(used, gpu):
        lines.append(f"does not fit: {reason}")
    return lines


def _echo_rl(work: Work, layout: Layout, rollout: Rollout | None, kind: str, constants: Constants | None) -> None:
    if rollout:
        for line in rl_lines(rl_step(work, layout, rollout, GPUS[kind], constants), rollout):
            click.echo(line)


def _parse(text: str, gpus: int) -> Layout:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 6 or min(numbers) < 1:
        raise ConfigError(f"--layout {text}: write up to six whole numbers of at least 1, e.g. 4,8,5,1,1,1")
    return Layout(gpus, *numbers)  # type: ignore[misc]


def _judge(work: Work, layout: Layout, kind: str, cache_tokens: int, constants: Constants | None) -> None:
    reason = impossible(layout, work)
    if reason:
        raise ConfigError(f"{layout.text()}: impossible: {reason}")
    used = memory(work, layout, cache_tokens)
    click.echo(_line(Candidate(layout, used, step_time(work, layout, GPUS[kind], constants)), kind))
    click.echo("memory of its fullest GPU: " + ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in used.table()))
    reason = too_large(used, GPUS[kind])
    if reason:
        raise ConfigError(f"{layout.text()}: does not fit: {reason}")


def _line(candidate: Candidate, kind: str) -> str:
    t = candidate.time
    return (
        f"{candidate.layout.text()}: {t.total:.2f} s a step, {t.tokens_per_s:,.0f} tokens/s/GPU, "
        f"MFU {100 * t.mfu(GPUS[kind]):.0f} %, {candidate.memory.total / 1e9:.0f} GB"
    )


def published_rl_table() -> list[str]:
    """Whole steps of RL, predicted beside published."""
    lines = ["seconds of a whole step of GRPO on H100, bf16, no constant fitted on them:"]
    for p in RL_ROWS:
        step = p.predicted()
        lines.append(
            f"{p.model:16} {p.layout.gpus:5}  {p.layout.text():28} {p.seconds:9.1f} {step.total:9.1f} "
            f"{100 * (step.total / p.seconds - 1.0):+6.1f}%  {p.source}; sampling {step.sampling:.0f}, scoring "
            f"{step.scoring:.0f}, training {step.training:.0f}, sync {step.sync.seconds:.1f}"
        )
    errors = [abs(p.predicted().total / p.seconds - 1.0) for p in RL_ROWS]
    return [*lines, f"mean absolute error: {100 * sum(errors) / len(errors):.1f} % of {len(errors)}"]


def simulated_table(work: Work, layout: Layout, kind: str, constants: Constants | None = None) -> list[str]:
    """The same model-parallel layout with more data parallelism, the batch growing with it."""
    lines = [
        f"simulated, 54 days, {FAILURES_PER_GPU_DAY:.2e} failures per GPU and day (Llama 3), "
        f"fat tree with {GPUS[kind].network / 1e9:.0f} GB/s per GPU:",
        "    GPUs  batch     s/step  MFU %  failures  save s  save every  productive %  simulated %",
    ]
    for gpus in (n for n in SIMULATED if n % (layout.gpus // layout.data) == 0):
        scaled = replace(layout, gpus=gpus)
        batch = max(work.batch, scaled.data * scaled.microbatch * max(1, layout.microbatches(work)))
        o = outlook(replace(work, batch=batch), scaled, GPUS[kind], constants=constants)
        lines.append(
            f"{gpus:8,} {batch:6,} {o.step.total:10.2f} {100 * o.step.mfu(GPUS[kind]):6.1f} {o.failures:9.0f} "
            f"{o.save_s:7.1f} {clock(o.interval_s):>11} {100 * o.efficiency:13.1f} {100 * o.simulated:12.1f}"
        )
    return lines


def published_table() -> list[str]:
    """Predicted beside published, by group, with the mean absolute errors, and those of rows that a fit left out."""
    c = fitted()
    lines = [
        f"tokens/s/GPU. Constants come from one H200 only (matmul {100 * c.gemm:.0f} % of peak, copy "
        f"{100 * c.bandwidth:.0f} % of the data sheet, x{c.slack:.2f} for the rest) but for one, which the rows with "
        f"experts below decide: {1e3 * c.count_s:.1f} ms that a pass waits for the numbers of tokens.",
        (
            f"{'model':16} {'':4} {'GPUs':>11}  {'layout':28} {'GBS':>5} {'published':>9} {'predicted':>9} "
            f"{'error':>7}  source; assumed"
        ),
    ]
    for p in ROWS:
        lines.append(
            f"{p.model:16} {p.precision:4} {p.layout.gpus:5} {p.gpu:5}  "
            f"{p.layout.text().replace(' recompute', ''):28} "
            f"{p.batch:5} {p.tokens_per_s:9,.0f} {p.predicted():9,.0f} {100 * p.error():+6.1f}%  "
            f"{p.source}{'; ' + p.assumed if p.assumed else ''}"
        )
    for group in dict.fromkeys(p.group for p in ROWS):
        n = sum(p.group == group for p in ROWS)
        lines.append(f"mean absolute error, {group}: {100 * mean_error(group):.1f} % of {n}")
        if group == "experts":
            lines.append(
                f"  {len(PUBLISHED)} constant fitted on {n} rows; each row by a fit without it: "
                f"{100 * left_out('row'):.1f} %, without all rows of its model: {100 * left_out('model'):.1f} %, with "
                f"no such constant: {100 * mean_error(group, constants=replace(c, count_s=0.0)):.1f} %"
            )
    lines.append(f"mean absolute error, all: {100 * mean_error():.1f} % of {len(ROWS)}")
    steps = [f"{s.case} with {s.impl}: x{getattr(c, s.constant):.2f}" for s in expert_steps()]
    if steps:
        lines.append(f"models with experts, measured by us: {'; '.join(steps)}")
    return lines
