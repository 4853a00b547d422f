"""`terrella eval` and `terrella worlds imagine` for grid world models: any exported folder, on fresh rooms, without
an engine.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import click

from ...core.errors import ConfigError, RolloutError, TerrellaError
from ...core.files import write_atomic, write_json
from ...core.progress import Progress

FRESH_SEED = 5_000_000  # rooms no shipped recipe trains on


def _options(command: Any) -> Any:
    for option in (
        click.option(
            "--model",
            type=click.Path(path_type=Path),
            required=True,
            help="A Hugging Face folder or a run (with --url: a model's name).",
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


@dataclass(frozen=True)
class Rooms:
    """The tasks of a grid world model, by the names of their options."""

    n: int
    steps: int
    walk: int
    rooms: int
    seed: int


def _asked(kind: Any, options: dict[str, Any]) -> Any:
    return kind(**{f.name: options[f.name] for f in fields(kind)})


def _prepare(world: str, model: Path, asked: Rooms) -> tuple[Any, Any, list]:
    """Dynamics, a sampler on the folder's weights, and the tasks."""
    from ...rl.grid.imagination import GridDynamics, make_task
    from ...rl.rollout.folder import folder_sampler

    if not model.is_dir():
        raise ConfigError(f"--model {model}: no such folder")
    dynamics, (sampler, config) = GridDynamics.of(world), folder_sampler(model)
    if config.vocab != dynamics.tokenizer().vocab_size:
        wanted = dynamics.tokenizer().vocab_size
        raise ConfigError(f"{model}: its vocabulary has {config.vocab} tokens, a world model of {world} has {wanted}")
    pool = [dynamics.start(FRESH_SEED + i) for i in range(asked.rooms)]
    tasks = [make_task(dynamics, pool, i, asked.steps, asked.walk, asked.seed) for i in range(asked.n)]
    return dynamics, sampler, tasks


def _evaluate_grid(
    world: str, model: Path, asked: Rooms, drift: int, temperatures: tuple[float, ...]
) -> dict[str, Any]:
    """A model's scores at each temperature; with `drift`, the imagined grids still true after 1, 2, ... steps."""
    from ...rl.evaluation import heat
    from ...rl.grid.evaluate import copy_baseline, imagine, score_columns, score_predictions, summarise
    from ...rl.text_games.world import drift_table

    steps = drift or asked.steps
    dynamics, sampler, tasks = _prepare(world, model, replace(asked, steps=steps))
    hits = {"copy": [[task.state == task.truths[k] for task in tasks] for k in range(steps)]}
    rows = [("copy the state", "baseline", copy_baseline(tasks))]
    progress = Progress("eval", len(temperatures))
    for done, temperature in enumerate(temperatures, 1):
        scores, episodes = imagine(sampler, tasks, dynamics.tokenizer(), temperature, asked.seed)
        name, texts = f"{model.name}, {heat(temperature)}", [e.texts() for e in episodes]
        hits[name] = [[t[k] == task.truths[k] for t, task in zip(texts, tasks, strict=True)] for k in range(steps)]
        rows.append((name, "model", scores))
        progress.update(done)
    if drift:
        return drift_table(hits, "Imagined states still exact")
    rows.append(("the true world", "ceiling", [score_predictions(t, t.truths) for t in tasks]))
    return {
        "title": "Fresh rooms",
        "columns": score_columns(steps),
        "rows": [{"name": name, "kind": kind, "cells": summarise(scores).cells()} for name, kind, scores in rows],
        "note": f"n = {asked.n} tasks in {asked.rooms} fresh rooms; percent, 95 % intervals",
    }


@click.command("eval")
@click.argument("world")
@_options
@click.option(
    "--temperature",
    "temperatures",
    type=click.FloatRange(0),
    multiple=True,
    help="0 is greedy. Grids: may be repeated, default 0 and 1; language: default 0; agents: default 1.",
)
@click.option("--url", help="Language: an OpenAI-compatible address; its key is read from TERRELLA_API_KEY.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True),
    help="Language: a folder of pair shards in place of our own questions.",
)
@click.option(
    "--prompt", type=click.Choice(["bare", "rules", "full"]), default="full", help="Language: with rules and examples?"
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
@click.option("--turns", "max_turns", type=click.IntRange(1), default=5, help="Agents.")
@click.option("--actions", "actions_per_turn", type=click.IntRange(1), default=5, help="Agents: in a turn.")
@click.option("--tags", "tags_file", type=click.Path(path_type=Path), help="Agents: a YAML file with tags of yours.")
@click.option("--reward", metavar="FILE.py:NAME", help="Rows: a function of prompt, answer and info, or a rule.")
@click.option("--template", metavar="JINJA", help="Rows: the prompt as a jinja text over the columns, or a file of it.")
@click.option("--env", metavar="FILE.py:NAME", help="Rows: an Environment of your own in their place.")
@click.pass_context
def evaluate(ctx: click.Context, world: str, model: Path, out: Path | None, url: str | None, **options: Any) -> None:
    """Score a world model of WORLD beside copying the state and the true world, with 95 % intervals.

    WORLD is a Sokoban tag, or text-game or web-page for language world models. With --url any tag plays: the served
    model is then an agent in that world, on --n seeds from 123. WORLD `rows` scores a model on rows of your own: a run
    is asked as it evaluated itself (terrella eval rows --model RUN --data FILE), a folder needs --data and --reward.
    """
    from ..language import DOMAINS, Questions, evaluate_language, show

    if out and not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: {out.parent} is no folder")
    if world == "rows":
        table = _evaluate_rows(ctx, model, options)
        _keep(table, out)
        return
    key, temperatures = os.environ.get("TERRELLA_API_KEY", ""), options["temperatures"]
    if len(temperatures) > 1 and (world in DOMAINS or url):
        raise ConfigError("--temperature: language models and agents are asked at one; give it once")
    if world in DOMAINS:
        temperature = temperatures[0] if temperatures else 0.0
        table = evaluate_language(world, str(model), _asked(Questions, options), temperature, url, key)
    elif url:
        from ...rl.agents.config import AgentSettings
        from ...rl.text_games.teacher import Teacher
        from ..agent_api import evaluate_agent

        temperature = temperatures[0] if temperatures else 1.0
        teacher = Teacher(url, str(model), key, temperature=temperature, max_tokens=options["max_new_tokens"])
        settings = AgentSettings(**{k: options[k] for k in ("fmt", "coordinates", "max_turns", "actions_per_turn")})
        table = evaluate_agent(world, teacher, settings, options["n"], options["samples"], options["tags_file"])
    else:
        table = _evaluate_grid(world, model, _asked(Rooms, options), options["drift"], temperatures or (0.0, 1.0))
    show(table)
    _keep(table, out)


def _keep(table: dict[str, Any], out: Path | None) -> None:
    """Write a table where it is asked for; one without a single valid result of a model is an error all the same."""
    if out:
        write_json(out, table)
    asked = {row["name"]: row["cells"] for row in table["rows"] if row["kind"] == "model"}
    if asked and not any(cell["n"] for cells in asked.values() for cell in cells):
        raise RolloutError(f"{', '.join(asked)}: no result is valid. {table.get('invalid', table['note'])}")


OF_ROWS = ("n", "samples", "temperatures", "max_new_tokens")


def _evaluate_rows(ctx: click.Context, model: Path, options: dict[str, Any]) -> dict[str, Any]:
    """A model on rows, or in an environment, of the user's own: what is not given is as the run has it."""
    from ..api import evaluate as on_rows

    given = {
        name for name in (*options, "url") if ctx.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE
    }
    own = {name: options[name] for name in ("data", "reward", "template", "env")}
    other = [p.opts[0] for p in ctx.command.params if p.name in given and p.name not in (*OF_ROWS, *own)]
    if other:
        raise ConfigError(f"{other[0]}: is no option of `terrella eval rows`")
    asked = {f"stages.evaluate.{name}": options[name] for name in OF_ROWS if name in given}
    try:
        return on_rows(model, **own, overrides=asked)
    except TerrellaError as error:
        options = {param.name: param.opts[0] for param in ctx.command.params}
        settings = rf"(?:--set )?\bstages\.evaluate\.({'|'.join(OF_ROWS)})\b"
        error.args = (re.sub(settings, lambda found: options[found[1]], str(error)),)  # as they are given here
        raise


@click.command()
@click.argument("world")
@_options
@click.option("--temperature", type=click.FloatRange(0), default=1.0)
def imagine(world: str, model: Path, out: Path | None, temperature: float, **options: Any) -> None:
    """Imagine trajectories with a world model of WORLD and print them, or write them as JSON lines."""
    from ...rl.grid import evaluate as grid

    asked = _asked(Rooms, options)
    dynamics, sampler, tasks = _prepare(world, model, asked)
    _, episodes = grid.imagine(sampler, tasks, dynamics.tokenizer(), temperature, asked.seed)
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
