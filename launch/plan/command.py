"""`terrella plan`: what a model costs on a cluster, which layout is best and why, how it scales, and how far to
trust the numbers.
"""

from __future__ import annotations

from dataclasses import replace

import click

from ...core import schema
from ...core.errors import ConfigError
from ...core.progress import clock
from ...models.config import ModelConfig
from ...models.geometry import GEOMETRIES, count
from .. import recipe as recipes
from ..recipe_files import methods, shipped
from .layout import Layout, Work, impossible
from .machine import GPUS, PUBLISHED
from .measured import expert_steps
from .memory import memory, too_large
from .published import ROWS, left_out, mean_error
from .search import Candidate, explain, search
from .simulate import FAILURES_PER_GPU_DAY, outlook
from .timing import fitted, step_time

SIMULATED = (1024, 2048, 4096, 8192, 16384)


@click.command()
@click.argument("model", default="llama3-8b")
@click.option("--nodes", type=int, default=1, help="Nodes of the cluster.")
@click.option("--gpus", type=int, help="GPUs in all, when it is not whole nodes.")
@click.option("--gpu", "kind", type=click.Choice(list(GPUS)), default="h100", help="Kind of GPU.")
@click.option("--sequence", type=int, default=4096, help="Tokens of a sequence.")
@click.option("--batch", type=int, default=256, help="Sequences of an optimizer step.")
@click.option("--precision", type=click.Choice(["bf16", "fp8"]), default="bf16")
@click.option(
    "--cache-tokens", type=int, default=0, help="Tokens in the key-value cache of a sampler on the same GPUs."
)
@click.option(
    "--layout",
    "wanted",
    metavar="T,P,V,C,E,M",
    help="Judge one layout: tensor,pipeline,virtual,context,expert,microbatch.",
)
@click.option("--top", type=int, default=5, help="Layouts to print.")
@click.option("--simulate", is_flag=True, help="Scale the best layout to 1,024 - 16,384 GPUs with failures.")
@click.option("--published", is_flag=True, help="Print predicted beside published figures, and the error.")
def plan(
    model: str,
    nodes: int,
    gpus: int | None,
    kind: str,
    sequence: int,
    batch: int,
    precision: str,
    cache_tokens: int,
    wanted: str | None,
    top: int,
    simulate: bool,
    published: bool,
) -> None:
    """Plan MODEL: a size by name (see --published for some), a recipe, or a recipe file."""
    if published:
        click.echo("\n".join(published_table()))
        return
    gpu = GPUS[kind]
    gpus = gpus or nodes * gpu.gpus_per_node
    work = Work(geometry(model), sequence, batch, precision)  # type: ignore[arg-type]
    counts = count(work.model)
    click.echo(
        f"{model}: {counts.total / 1e9:.2f} B parameters, {counts.active / 1e9:.2f} B in a token's matmuls; "
        f"{batch} x {sequence} tokens a step, {precision}, on {gpus} x {gpu.name}"
    )
    if wanted:
        _judge(work, _parse(wanted, gpus), kind, cache_tokens)
        return
    found = search(work, gpus, gpu, cache_tokens)
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
    if simulate:
        click.echo("\n".join(simulated_table(work, best.layout, kind)))


def geometry(name: str) -> ModelConfig:
    """A model by the name of its size, or out of a recipe."""
    if name.lower() in GEOMETRIES:
        return GEOMETRIES[name.lower()]
    if name in shipped() or name in methods() or name.endswith((".yaml", ".yml")):
        return recipes.load(name).model.sizes
    raise ConfigError(
        f"'{name}' is no model size and no recipe; sizes: {', '.join(GEOMETRIES)}; recipes: {', '.join(shipped())}"
    )


def _parse(text: str, gpus: int) -> Layout:
    try:
        numbers = [int(part) for part in text.split(",")]
        return Layout(gpus, *numbers)  # type: ignore[misc]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--layout {text}: write up to six whole numbers, e.g. 4,8,5,1,1,1") from error


def _judge(work: Work, layout: Layout, kind: str, cache_tokens: int) -> None:
    reason = impossible(layout, work)
    if reason:
        raise ConfigError(f"{layout.text()}: impossible: {reason}")
    used = memory(work, layout, cache_tokens)
    click.echo(_line(Candidate(layout, used, step_time(work, layout, GPUS[kind])), kind))
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


def simulated_table(work: Work, layout: Layout, kind: str) -> list[str]:
    """The same model-parallel layout with more data parallelism, the batch growing with it."""
    lines = [
        f"simulated, 54 days, {FAILURES_PER_GPU_DAY:.2e} failures per GPU and day (Llama 3), "
        f"fat tree with {GPUS[kind].network / 1e9:.0f} GB/s per GPU:",
        "    GPUs  batch     s/step  MFU %  failures  save s  save every  productive %  simulated %",
    ]
    for gpus in SIMULATED:
        scaled = replace(layout, gpus=gpus)
        batch = max(work.batch, scaled.data * scaled.microbatch * max(1, layout.microbatches(work)))
        o = outlook(replace(work, batch=batch), scaled, GPUS[kind])
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
