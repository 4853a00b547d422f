"""`terrella worlds score`: world models judged by rules and not by another model, side by side in one table."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..core.errors import ConfigError
from ..data.trajectory import Invalid
from .language import FRESH_SEED, Answerer, folder_answerer, held_out, predictor, served_answerer, spread
from .text_model import model_folder

JUDGED = 128  # true games that an agent plays before and after its training
COLUMNS = ["next state", "changed states", "after {k} steps", "pages: F1 of changes", "pages: exact"]


@dataclass(frozen=True)
class Asked:
    """What every model is asked."""

    n: int  # held-out transitions of each kind
    walks: int  # games walked for the drift, and of each policy
    steps: int
    games: tuple[str, ...]  # () for all of ours
    prompt: str
    kinds: tuple[str, ...]  # text-game, web-page
    train: int = 0  # updates of an agent in each model, judged in the true games; 0 leaves it out


def answerer(model: str, max_new_tokens: int, pad_prompts_to: int) -> tuple[str, Answerer]:
    """A folder, a run, or an OpenAI-compatible address as URL#NAME; answers are greedy."""
    if not model.startswith(("http://", "https://")):
        folder = model_folder(Path(model))
        return Path(model).resolve().name, folder_answerer(folder, 0.0, max_new_tokens, pad_prompts_to, 0)
    url, _, name = model.partition("#")
    if not name:
        raise ConfigError(f"{model}: write the model's name behind the address, as in http://localhost:8000/v1#NAME")
    return name, served_answerer(url, name, os.environ.get("TERRELLA_API_KEY", ""), 0.0, max_new_tokens)


def score(models: Sequence[tuple[str, Answerer]], asked: Asked) -> dict[str, Any]:
    """The table: copying, the models, and the true world; `ranking` has how each orders policies, by its name."""
    from ..rl.rewards.web_page import NOTHING
    from ..rl.text_games.evaluate import copy_answers, oracle_answers
    from ..rl.text_games.world import true_predictor

    questions = {kind: _questions(kind, asked) for kind in asked.kinds}
    rows = {
        "text-game": [q.row for q in questions.get("text-game", [])],
        "web-page": [q.answer for q in questions.get("web-page", [])],
    }
    lines = [
        ("copy", "baseline", _Line(copy_answers(rows["text-game"]), [NOTHING] * len(rows["web-page"]), copy_answers))
    ]
    for name, answer in models:
        given = {kind: _answered(name, answer, questions[kind]) for kind in asked.kinds}
        line = _Line(given.get("text-game", []), given.get("web-page", []), predictor(answer, asked.prompt))
        lines.append((name, "model", line))
    truth = _Line(oracle_answers(rows["text-game"]), rows["web-page"], true_predictor)
    lines.append(("true world", "ceiling", truth))
    table, ranking = [], {}
    for name, kind, line in lines:
        cells, ranked = _cells(line, rows, asked)
        table.append({"name": name, "kind": kind, "cells": cells})
        ranking |= {name: ranked} if ranked else {}
    counts = " and ".join(f"{len(questions[kind])} fresh transitions of {kind}" for kind in asked.kinds)
    note = f"n = {counts}, {asked.walks} walks; greedy, strict judge, 95 % intervals."
    columns = [column.format(k=asked.steps) for column in COLUMNS]
    return {"title": "World models, percent", "columns": columns, "rows": table, "note": note, "ranking": ranking}


def _questions(kind: str, asked: Asked) -> list[Any]:
    """Transitions of fresh games, or held-out ones of our pages, spread evenly to n."""
    if kind == "web-page":
        return held_out(kind, None, asked.n, asked.prompt)
    from ..data.convert.text_game import pair_of
    from ..rl.language import read_pair
    from ..rl.text_games.crawl import GAMES, crawl_all, prompt_writer

    rows = crawl_all(list(asked.games) or list(GAMES), range(FRESH_SEED, FRESH_SEED + 1))
    write = prompt_writer(asked.prompt)
    return [read_pair(pair_of(row, write, "test")) for row in spread(rows, asked.n)]


@dataclass(frozen=True)
class _Line:
    games: Sequence[Any]  # answers to the held-out questions
    pages: Sequence[Any]
    predict: Callable[[list[Any]], list[Any]]  # rows of games -> answers, for the walks


def _answered(name: str, answer: Answerer, questions: list[Any]) -> list[Any]:
    given = answer(questions)
    if given and all(isinstance(one, Invalid) for one in given):
        raise ConfigError(f"{name}: gave no answer at all: {given[0].reason}")
    return given


def _cells(line: _Line, rows: dict[str, list[Any]], asked: Asked) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    from ..rl.statistics import mean, proportion
    from ..rl.text_games import evaluate as games
    from ..rl.text_games.crawl import GAMES
    from ..rl.text_games.ranking import policy_scores
    from ..rl.text_games.training import training_gain
    from ..rl.text_games.world import drift
    from ..rl.video.real2sim import agreement
    from ..rl.web_pages import evaluate as pages

    nothing, ranked = proportion(0, 0).to_cell(), {}
    cells = [nothing] * 3
    if "text-game" in asked.kinds:
        right = games.accuracies(games.judge_rows(rows["text-game"], line.games, "strict"))
        chosen = list(asked.games) or list(GAMES)
        last = drift(chosen, asked.walks, asked.steps, line.predict, first_seed=FRESH_SEED)["model"][-1]
        cells = [right[2].to_cell(), right[1].to_cell(), proportion(sum(last), len(last)).to_cell()]
        scores = policy_scores(chosen, asked.walks, asked.steps, line.predict, first_seed=FRESH_SEED)
        agreed = agreement(scores.true, scores.imagined)
        r = None if math.isnan(agreed.r) else agreed.r  # a model in which all policies score alike orders none
        ranked = {"true": scores.true, "imagined": scores.imagined, "r": r, "mmrv": agreed.mmrv, "gap": agreed.gap}
        ranked["planning"] = mean(scores.gains).to_cell()
        if asked.train:
            agent = training_gain(chosen, asked.train, JUDGED, asked.steps, line.predict, first_seed=FRESH_SEED)
            agents = {"before": agent.before, "after": agent.after, "gain": agent.gains}
            ranked["training"] = {name: mean(scores).to_cell() for name, scores in agents.items()}
    if "web-page" not in asked.kinds:
        return [*cells, nothing, nothing], ranked
    judged = pages.scores(rows["web-page"], pages.judge_pages(rows["web-page"], line.pages, "strict"))
    return [*cells, judged[3].to_cell(), judged[4].to_cell()], ranked


def show_ranking(ranking: dict[str, Any]) -> None:
    """Print how each line orders policies that mix the expert with other actions, and what planning with it and
    training in it gain.
    """
    for name, found in ranking.items():
        r = "none" if found["r"] is None else f"{found['r']:.2f}"
        scores = ", ".join(f"{value:.2f}" for value in found["imagined"])
        gain = found["planning"]
        click.echo(
            f"policy ranking, {name[:24]:24} r = {r:>5}  MMRV = {found['mmrv']:.2f}  "
            f"scores of five policies: {scores}\n"
            f"planning gain,  {name[:24]:24} {gain['value']:+.2f} ({gain['low']:+.2f} to {gain['high']:+.2f}), "
            f"n = {gain['n']} starts"
        )
        if "training" in found:
            before, after, gain = (found["training"][name] for name in ("before", "after", "gain"))
            click.echo(
                f"training gain,  {name[:24]:24} {gain['value']:+.2f} ({gain['low']:+.2f} to {gain['high']:+.2f}), "
                f"true score {before['value']:.2f} -> {after['value']:.2f}, n = {gain['n']} starts"
            )
