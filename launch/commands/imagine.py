"""`terrella eval` and `terrella worlds imagine` for grid world models: any exported folder, on fresh rooms, without
an engine.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from ...core.errors import ConfigError
from ...core.files import write_atomic, write_json
from ...core.progress import Progress

FRESH_SEED = 5_000_000  # rooms no shipped recipe trains on


def _options(command: Any) -> Any:
    for option in (
        click.option(
            "--model",
            type=click.Path(path_type=Path),
            required=True,
            help="A Hugging Face folder (with --url: a model's name).",
        ),
        click.option("--n", type=click.IntRange(1), default=512, help="Tasks."),
        click.option("--steps", type=click.IntRange(1), default=4, help="States to imagine."),
        click.option("--walk", type=click.IntRange(0), default=8, help="Random actions before the start, at most."),
        click.option("--rooms", type=click.IntRange(1), default=256, help="Fresh rooms to draw tasks from."),
        click.option("--seed", type=int, default=0),
        click.option("--out", type=click.Path(path_type=Path), help="Write the result to this file."),
    ):
        command = option(command)
    return command


def _prepare(world: str, model: Path, n: int, steps: int, walk: int, rooms: int, seed: int) -> tuple[Any, Any, list]:
    """Dynamics, a sampler on the folder's weights, and the tasks."""
    from ...models.families import parameter_names
    from ...models.hf import read_config, weight_source
    from ...rl.grid.imagination import GridDynamics, make_task
    from ...rl.rollout.embedded import EmbeddedSampler

    if not model.is_dir():
        raise ConfigError(f"--model {model}: no such folder")
    dynamics, config = GridDynamics.of(world), read_config(model)
    if config.vocab != dynamics.tokenizer().vocab_size:
        wanted = dynamics.tokenizer().vocab_size
        raise ConfigError(f"{model}: its vocabulary has {config.vocab} tokens, a world model of {world} has {wanted}")
    source, _ = weight_source(model, config)
    weights = {name: source(name) for name in parameter_names(config)}
    pool = [dynamics.start(FRESH_SEED + i) for i in range(rooms)]
    return (
        dynamics,
        EmbeddedSampler(lambda: weights, config),
        [make_task(dynamics, pool, i, steps, walk, seed) for i in range(n)],
    )


def _drift(
    dynamics: Any, sampler: Any, tasks: list, steps: int, name: str, temperatures: tuple[float, ...], seed: int
) -> dict[str, Any]:
    """The table of imagined grids that still equal the true ones after 1, 2, ... steps."""
    from ...rl.grid.evaluate import imagine
    from ...rl.text_games.world import drift_table

    hits = {"copy": [[task.state == task.truths[k] for task in tasks] for k in range(steps)]}
    for temperature in temperatures:
        _, episodes = imagine(sampler, tasks, dynamics.tokenizer(), temperature, seed)
        told = [(e.texts(), e.task.truths) for e in episodes]
        hits[f"{name}, {'greedy' if temperature == 0 else f'temperature {temperature:g}'}"] = [
            [texts[k] == truths[k] for texts, truths in told] for k in range(steps)
        ]
    return drift_table(hits, "Imagined states still exact")


@click.command("eval")
@click.argument("world")
@_options
@click.option("--temperature", "temperatures", type=click.FloatRange(0), multiple=True, default=(0.0, 1.0))
@click.option("--url", help="Language: an OpenAI-compatible address; its key is read from TERRELLA_API_KEY.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True),
    help="Language: a folder of pair shards in place of our own questions.",
)
@click.option(
    "--prompt", type=click.Choice(["bare", "full"]), default="full", help="Language: with rules and examples?"
)
@click.option("--mode", type=click.Choice(["strict", "faithful"]), default="strict", help="Language: the judge.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=1024, help="Language.")
@click.option("--pad-prompts-to", type=click.IntRange(1), default=1, help="Language: as the model was trained.")
@click.option(
    "--drift",
    type=click.IntRange(0),
    default=0,
    help="Grids, text games: states still exact after 1 to so many steps, of --n episodes.",
)
@click.option(
    "--game", "games", multiple=True, help="Text games: walk this one (may be repeated); without it, all of ours."
)
@click.option("--samples", type=click.IntRange(1), default=8, help="Agents: episodes of each seed.")
@click.option("--format", "fmt", type=click.Choice(["answer", "think", "state"]), default="think", help="Agents.")
@click.option("--coordinates", is_flag=True, help="Agents: show and ask for states with their coordinates.")
@click.option("--turns", type=click.IntRange(1), default=5, help="Agents.")
@click.option("--actions", type=click.IntRange(1), default=5, help="Agents: in a turn.")
@click.option("--tags", "tags_file", type=click.Path(path_type=Path), help="Agents: a YAML file with tags of yours.")
def evaluate(
    world: str,
    model: Path,
    n: int,
    steps: int,
    walk: int,
    rooms: int,
    seed: int,
    out: Path | None,
    temperatures: tuple[float, ...],
    url: str | None,
    data: Path | None,
    prompt: str,
    mode: str,
    max_new_tokens: int,
    pad_prompts_to: int,
    drift: int,
    games: tuple[str, ...],
    samples: int,
    fmt: str,
    coordinates: bool,
    turns: int,
    actions: int,
    tags_file: Path | None,
) -> None:
    """Score a world model of WORLD beside copying the state and the true world, with 95 % intervals.

    WORLD is a Sokoban tag, or text-game or web-page for language world models. With --url any tag plays: the served
    model is then an agent in that world, on --n seeds from 123.
    """
    from ...rl.grid.evaluate import copy_baseline, imagine, score_predictions, summarise
    from ..language import DOMAINS, evaluate_language, show

    if world in DOMAINS:
        evaluate_language(
            world,
            str(model),
            url=url,
            key=os.environ.get("TERRELLA_API_KEY", ""),
            data=data,
            n=n,
            prompt=prompt,
            mode=mode,
            temperature=temperatures[0],
            max_new_tokens=max_new_tokens,
            multiple=pad_prompts_to,
            seed=seed,
            out=out,
            drift=drift,
            games=games,
        )
        return
    if url:
        from ...rl.agents.config import AgentSettings
        from ..agent_api import evaluate_agent

        evaluate_agent(
            world,
            str(model),
            url=url,
            key=os.environ.get("TERRELLA_API_KEY", ""),
            seeds=n,
            samples=samples,
            settings=AgentSettings(fmt=fmt, coordinates=coordinates, max_turns=turns, actions_per_turn=actions),  # type: ignore[arg-type]
            temperature=temperatures[-1],
            max_new_tokens=max_new_tokens,
            tags_file=tags_file,
            out=out,
        )
        return
    dynamics, sampler, tasks = _prepare(world, model, n, drift or steps, walk, rooms, seed)
    if drift:
        table = _drift(dynamics, sampler, tasks, drift, model.name, temperatures, seed)
        show(table)
        if out:
            write_json(out, table)
        return
    rows = [("copy the state", summarise(copy_baseline(tasks)))]
    progress = Progress("eval", len(temperatures))
    for done, temperature in enumerate(temperatures, 1):
        scores, _ = imagine(sampler, tasks, dynamics.tokenizer(), temperature, seed)
        rows.append(
            (f"{model.name}, {'greedy' if temperature == 0 else f'temperature {temperature:g}'}", summarise(scores))
        )
        progress.update(done)
    rows.append(("the true world", summarise([score_predictions(t, t.truths) for t in tasks])))
    columns = ["1 step exact", f"all {steps} steps exact", "1 step changed cells", f"{steps} steps changed cells"]
    click.echo(f"{'':32}" + "".join(f"{name:>26}" for name in columns))
    for name, summary in rows:
        cells = [f"{100 * c['value']:.1f} ({100 * c['low']:.1f}-{100 * c['high']:.1f})" for c in summary.cells()]
        click.echo(f"{name[:31]:32}" + "".join(f"{cell:>26}" for cell in cells))
    click.echo(f"n = {n} tasks in {rooms} fresh rooms; percent, 95 % intervals")
    if out:
        write_json(
            out, {"columns": columns, "rows": [{"name": name, "cells": summary.cells()} for name, summary in rows]}
        )


@click.command()
@click.argument("world")
@_options
@click.option("--temperature", type=click.FloatRange(0), default=1.0)
def imagine(
    world: str, model: Path, n: int, steps: int, walk: int, rooms: int, seed: int, out: Path | None, temperature: float
) -> None:
    """Imagine trajectories with a world model of WORLD and print them, or write them as JSON lines."""
    from ...rl.grid import evaluate as grid

    dynamics, sampler, tasks = _prepare(world, model, n, steps, walk, rooms, seed)
    _, episodes = grid.imagine(sampler, tasks, dynamics.tokenizer(), temperature, seed)
    rows = [{"prompt_id": e.prompt_id, "reward": e.score()[1], "turns": e.picture(dynamics)} for e in episodes]
    if out:
        write_atomic(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        click.echo(f"{len(rows)} trajectories in {out}")
        return
    for row in rows:
        click.echo(f"task {row['prompt_id']}: {100 * row['reward']:.0f} % of the states exact")
        for turn in row["turns"]:
            click.echo(f"  {turn['action']}: {'exact' if turn['exact'] else 'wrong'}")
            for before, predicted, truth in zip(
                *(turn[k].split("\n") for k in ("prompt", "prediction", "truth")), strict=True
            ):
                click.echo(f"    {before}   {predicted}   {truth}")
